"""The OpenAPI document of the admin API, made of the table of operations."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from greenroom.core.operations import OPERATIONS, DeployFlags, Operation

_REF = "#/components/schemas/{model}"
_PLAIN = ("string", "integer", "number", "boolean", "null")
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


def openapi() -> dict[str, Any]:
    """Return the document, of OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Problem": _problem_schema()}
    paths = {
        f"/api/v1/{key}": _path(kind, schemas)
        for key, kind in sorted(OPERATIONS.items())
        if kind.role is not None
    }
    paths["/api/token"] = _read("token", "Answers the name, role and end of the token itself.", {})
    paths["/api/logs"] = _read("logs", "Answers the logs of a host, or lines of one.", _LOG_FIELDS)
    paths["/api/serve/applications/"] = _documents()
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
            "responses": {
                "Problem": {
                    "description": "What went wrong.",
                    "content": {
                        "application/problem+json": {
                            "schema": {"$ref": _REF.format(model="Problem")}
                        }
                    },
                }
            },
        },
    }


def _path(kind: type[Operation], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = kind.from_json().model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    schema.pop("description", None)
    title = kind.__name__
    schemas[title] = schema
    post = {
        **_described(kind),
        "operationId": kind.key,
        "parameters": [_KEY] if kind.is_read else [_KEY, _WAIT],
        "requestBody": {
            "required": bool(schema.get("required")),
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=title)}}},
        },
        "responses": _responses(kind),
    }
    path = {"post": post}
    fields = schema.get("properties", {})
    if kind.is_read and all(_is_plain(each) for each in fields.values()):
        path["get"] = {
            **_described(kind),
            "operationId": f"{kind.key}_by_query",
            "parameters": [
                {
                    "name": name,
                    "in": "query",
                    "required": name in schema.get("required", ()),
                    "schema": each,
                }
                for name, each in fields.items()
            ],
            "responses": _responses(kind),
        }
    return path


def _read(name: str, summary: str, fields: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": each, "in": "query", "schema": of} for each, of in fields.items()]
    problem = {"$ref": "#/components/responses/Problem"}
    answer = {"description": "The answer.", "content": {"application/json": {"schema": {}}}}
    responses = {"200": answer, "401": problem, "default": problem}
    get = {"operationId": name, "summary": summary, "tags": ["viewer"]}
    return {"get": {**get, "parameters": parameters, "responses": responses}}


def _documents() -> dict[str, Any]:
    summaries = {
        "get": "Answers all applications, in the shape of Ray Serve's ServeInstanceDetails.",
        "put": "Makes the applications be those of a document: Ray Serve's ServeDeploySchema.",
        "delete": "Deletes all applications.",
    }
    path = {}
    for method, summary in summaries.items():
        read = _read(f"{method}_applications", summary, {})["get"]
        path[method] = {**read, "tags": ["viewer" if method == "get" else "deployer"]}
    fields = DeployFlags.model_json_schema()["properties"]
    put = path["put"]
    put["parameters"] = [
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
    put["requestBody"] = {"required": True, "content": content}
    for method in ("put", "delete"):
        path[method]["responses"]["202"] = {
            "description": "The change is saved, and its goals are under way: see wait_for_goal.",
            "content": {"application/json": {"schema": {}}},
        }
    return path


def _described(kind: type[Operation]) -> dict[str, Any]:
    summary, _, more = inspect.cleandoc(kind.__doc__ or "").partition("\n")
    text = f"{more.strip()}\n\nTakes a token of the role {kind.role} or a higher one.".strip()
    return {"summary": summary, "description": text, "tags": [str(kind.role)]}


def _responses(kind: type[Operation]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if kind.answers_goal:
        answer = {
            "type": "object",
            "properties": {
                "goal": {"type": ["string", "null"]},
                "reached": {"type": "boolean"},
            },
            "required": ["goal", "reached"],
        }
    content = {"application/json": {"schema": answer}}
    problem = {"$ref": "#/components/responses/Problem"}
    responses: dict[str, Any] = {
        "200": {"description": "The answer; what was to be done is done.", "content": content},
        **{str(status): problem for status in (400, 401, 403, 404, 503)},
        "default": problem,
    }
    if not kind.is_read or kind.key == "wait_for_goal":
        responses["202"] = {
            "description": "The change is saved, and its goals are under way: see wait_for_goal.",
            "content": content,
        }
    return responses


def _is_plain(schema: dict[str, Any]) -> bool:
    each = schema.get("anyOf", [schema])
    return all(one.get("type") in _PLAIN or "enum" in one for one in each)


def _problem_schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "description": "A problem document of RFC 9457.",
        "type": "object",
        "properties": {"type": text, "title": text, "status": {"type": "integer"}, "detail": text},
        "required": ["type", "title", "status", "detail"],
    }
