"""The OpenAPI document of the admin API, made of the table of operations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from greenroom.core.operations import OPERATIONS, DeployFlags, Operation

_REF = "#/components/schemas/{model}"
_PLAIN = ("string", "integer", "number", "boolean", "null")
_PROBLEM = {"$ref": "#/components/responses/Problem"}
_WAIT = {
    "name": "wait",
    "in": "query",
    "description": "Seconds to wait for the goals of the change, 300 at most.",
    "schema": {"type": "number", "minimum": 0, "maximum": 300, "default": 0},
}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same request with the same key is carried out once.",
    "schema": {"type": "string"},
}
_LOG_FIELDS = {
    "host": {"type": "string", "description": "Whose logs; without it, of the host that answers."},
    "log": {"type": "string", "description": "Its name; without one the names are answered."},
    "after": {"type": "integer", "minimum": 0, "description": "The `next` of an answer before."},
}
_GOAL = {
    "type": "object",
    "properties": {"goal": {"type": ["string", "null"]}, "reached": {"type": "boolean"}},
    "required": ["goal", "reached"],
}
_ACCEPTED = "The change is saved, and its goals are under way: see wait_for_goal."
_TEXT = {"type": "string"}
_PROBLEM_SCHEMA = {
    "description": "A problem document of RFC 9457.",
    "type": "object",
    "properties": {"type": _TEXT, "title": _TEXT, "status": {"type": "integer"}, "detail": _TEXT},
    "required": ["type", "title", "status", "detail"],
}


def openapi() -> dict[str, Any]:
    """Return the document, of OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM_SCHEMA}
    paths = {
        f"/api/v1/{key}": _operation(kind, schemas)
        for key, kind in sorted(OPERATIONS.items())
        if kind.role is not None
    }
    paths["/api/token"] = {
        "get": _read("token", "Answers the name, role and end of the token itself.")
    }
    summary = "Answers the logs of a host, or lines of one."
    paths["/api/logs"] = {"get": _read("logs", summary, _LOG_FIELDS)}
    paths["/api/serve/applications/"] = _documents()
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Greenroom's admin API",
            "version": version("greenroom"),
            "description": "Every operation of the admin client. Bytes are base64.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {"Problem": {"description": "What went wrong.", "content": problem}},
        },
    }


def _operation(kind: type[Operation], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    schema.pop("description", None)
    schemas[kind.__name__] = schema
    required = schema.get("required", ())
    summary, _, more = inspect.cleandoc(kind.__doc__ or "").partition("\n")
    text = f"{more.strip()}\n\nTakes a token of the role {kind.role} or a higher one.".strip()
    answer = _GOAL if kind.answers_goal else {}
    responses = {"200": _answer("The answer; what was to be done is done.", answer)}
    responses |= {str(status): _PROBLEM for status in (400, 401, 403, 404, 503)}
    responses["default"] = _PROBLEM
    if not kind.is_read or kind.key == "wait_for_goal":
        responses["202"] = _answer(_ACCEPTED, answer)
    both = {
        "summary": summary,
        "description": text,
        "tags": [str(kind.role)],
        "responses": responses,
    }
    content = _json({"$ref": _REF.format(model=kind.__name__)})
    post = {
        **both,
        "operationId": kind.key,
        "parameters": [_KEY] if kind.is_read else [_KEY, _WAIT],
        "requestBody": {"required": bool(required), "content": content},
    }
    fields = schema.get("properties", {})
    if not (kind.is_read and all(_is_plain(each) for each in fields.values())):
        return {"post": post}
    parameters = [{**each, "required": each["name"] in required} for each in _in_query(fields)]
    get = {**both, "operationId": f"{kind.key}_by_query", "parameters": parameters}
    return {"post": post, "get": get}


def _read(name: str, summary: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["viewer"],
        "parameters": _in_query(fields or {}),
        "responses": {"200": _answer("The answer."), "401": _PROBLEM, "default": _PROBLEM},
    }


def _documents() -> dict[str, Any]:
    summaries = {
        "get": "Answers all applications, in the shape of Ray Serve's ServeInstanceDetails.",
        "put": "Makes the applications be those of a document: Ray Serve's ServeDeploySchema.",
        "delete": "Deletes all applications.",
    }
    path = {
        method: _read(f"{method}_applications", summary) for method, summary in summaries.items()
    }
    for method in ("put", "delete"):
        path[method]["tags"] = ["deployer"]
        path[method]["responses"]["202"] = _answer(_ACCEPTED)
    fields = DeployFlags.model_json_schema()["properties"]
    path["put"]["parameters"] = [
        {
            "name": name,
            "in": "query",
            "description": of.pop("description"),
            "schema": {key: value for key, value in of.items() if value not in (None, [], {})},
        }
        for name, of in fields.items()
    ]
    document = {"schema": {"type": "object"}}
    content = {"application/json": document, "application/yaml": document}
    path["put"]["requestBody"] = {"required": True, "content": content}
    return path


def _in_query(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": of} for name, of in fields.items()]


def _answer(description: str, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"description": description, "content": _json(schema or {})}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _is_plain(schema: dict[str, Any]) -> bool:
    each = schema.get("anyOf", [schema])
    return all(one.get("type") in _PLAIN or "enum" in one for one in each)
