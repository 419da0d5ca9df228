"""Requests that schemathesis makes up of the OpenAPI document: each answer is one it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, reject, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from greenroom.http_front.admin.openapi import openapi
from tests.http.admin import Api
from tests.support.asking import Got

pytestmark = pytest.mark.slow

# Requests are made up without tokens, and sent with one and without.
DOCUMENT = openapi()
SCHEMA = schemathesis.openapi.from_dict({**DOCUMENT, "security": []})
REQUESTS = {each.label: each for each in (found.ok() for found in SCHEMA.get_all_operations())}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = 15
LONG = 4_000  # about max_target_bytes
EXAMPLES_OF_DOCUMENTS = 2  # one that is valid starts a process, which imports what it names


def has_fields(request: Any) -> bool:
    """Return whether there is anything in it that could be wrong.

    Of an object without fields schemathesis may seek wrong ones for minutes.
    """
    raw = request.definition.raw
    if bodies := raw.get("requestBody", {}).get("content", {}).values():
        return any(_names_fields(each["schema"]) for each in bodies)
    return bool(raw.get("parameters"))


def _names_fields(schema: dict[str, Any]) -> bool:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return bool(schema.get("properties")) or schema.get("additionalProperties") is not False


@st.composite
def cases(draw: st.DrawFn, label: str, mode: GenerationMode) -> schemathesis.Case:
    """Make up a request, unless schemathesis stumbles over bytes that it has made up itself.

    It makes some in place of text, and cannot tell then whether a list of them has an item twice.
    """
    try:
        return draw(REQUESTS[label].as_strategy(generation_mode=mode))
    except ValueError as error:
        if "Unsupported type: 'Binary'" not in str(error):
            raise
        reject()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(tmp_path_factory.mktemp("api"))
    made.ask("POST", "/v1/create_backend", {"tag": "m", "code": "", "code_hash": "hash"})
    made.ask("POST", "/v1/create_endpoint", {"name": "e", "backend": "m", "route": "/e"})
    yield made
    made.front.front.access_log.flush()


def send(api: Api, request: requests.PreparedRequest) -> Got:
    """Send a request to the front in this process."""
    pairs = {"host": "localhost", **{n.lower(): str(value) for n, value in request.headers.items()}}
    body = request.body or b""
    return api.front.ask(
        str(request.method),
        "/-" + request.path_url,
        headers=tuple((name.encode(), value.encode("latin-1")) for name, value in pairs.items()),
        body=body.encode() if isinstance(body, str) else body,
    )


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        (label, mode)
        for label, request in REQUESTS.items()
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or has_fields(request)
    ],
)
def test_answers_are_those_of_the_document(api: Api, label: str, mode: GenerationMode) -> None:
    examples = EXAMPLES_OF_DOCUMENTS if label.startswith("PUT") else EXAMPLES

    @settings(
        max_examples=examples,
        derandomize=True,  # what it draws otherwise may take minutes
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),  # to explain, it traces each line before Python 3.12
    )
    @given(cases(label, mode))
    def run(case: schemathesis.Case) -> None:
        how = case.as_transport_kwargs(base_url="http://localhost")
        parts = ("method", "url", "headers", "params", "data", "json")
        request = requests.Request(**{name: how.get(name) for name in parts}).prepare()
        assume(len(request.path_url) < LONG)  # which no operation answers
        assert send(api, request).status == 401
        request.headers["authorization"] = "Bearer admin"
        answer = send(api, request)
        headers = {name: [value] for name, value in answer.headers.items()}
        is_too_large = answer.status == 413  # a refusal, which the one check does not know as such
        case.validate_response(
            schemathesis.Response(answer.status, headers, answer.body, request, 0.0, verify=False),
            checks=[
                each for each in CHECKS if not (is_too_large and each is negative_data_rejection)
            ],
        )

    run()


def test_the_roles_of_the_document_are_enforced(api: Api) -> None:
    paths = DOCUMENT["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            (role,) = operation["tags"]
            for token in ("viewer", "deployer")[: ("viewer", "deployer", "admin").index(role)]:
                answer = api.ask(method.upper(), path.removeprefix("/api"), {}, token=token)
                assert answer.status == 403, (method, path, token)
