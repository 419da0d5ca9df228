"""What a recorder keeps, what it leaves out, and what a recording may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from greenroom.core.comparing.comparing import Response
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.serve.measuring import recording
from greenroom.serve.measuring.recording import Recorder, endpoint_of, read, recorder_of


def ask(recorder: Recorder, body: bytes = b"", **headers: str) -> Response:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/é",
        "raw_path": "/é".encode(),
        "query_string": b"a=1",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    answer = asyncio.run(recorder(Request(scope, receive)))
    return Response(200, body=bytes(answer.body))


def test_a_query_and_its_answer_are_taken_once_without_secrets():
    recorder = Recorder(("authorization", "set-cookie"))
    shadow = ask(recorder, b"in", authorization="secret", accept="a")
    assert recorder.take() == ([], 0)
    headers = (("set-cookie", "secret"), ("x", "y"))
    recorder.answered(Response(201, headers, b"out"), shadow)
    recorder.answered(Response(201, headers, b"again"), shadow)
    [row], dropped = recorder.take()
    assert "secret" not in json.dumps(row)
    assert row["headers"] == [("authorization", "REDACTED"), ("accept", "a")]
    assert (row["status"], row["body"], row["answer"], dropped) == (201, "aW4=", "b3V0", 0)
    assert row["raw_path"].encode("latin-1").decode() == "/é"
    assert recorder.take() == ([], 0)


def test_what_a_recorder_keeps_is_bounded(monkeypatch):
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", 2_000)
    monkeypatch.setattr(recording, "MAX_READY_BYTES", 1_500)
    recorder = Recorder(())
    shadows = [ask(recorder) for _ in range(6)]  # of some 500 bytes each
    for shadow in shadows:
        recorder.answered(Response(200), shadow)
    rows, dropped = recorder.take()
    assert (len(rows), dropped) == (2 + 1, 2 + 1)


def test_an_answer_that_is_none_of_the_recorders_is_left_alone():
    recorder = Recorder(())
    recorder.answered(Response(200), Response(500, body=b"failed"))
    recorder.answered(Response(200), Response(200, body=b"7"))
    assert recorder.take() == ([], 0)


HEAD = b'{"greenroom": "recording", "format": 1, "endpoint": "a"}\n'


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_reported(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(HEAD + b'{"at": 1}\n{"at"')
    assert list(read(file)) == [{"at": 1}]
    assert endpoint_of(file) == "a"
    file.write_bytes(HEAD + b'{"at"\n{"at": 1}\n')
    with pytest.raises(GreenroomError, match="line 2"):
        list(read(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "no recording"), (b"[]\n", "no recording"), (HEAD.replace(b"1", b"9"), "format 9")],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=message):
        next(read(tmp_path / "rows"))


def test_any_endpoint_has_a_recorder_of_an_allowed_name():
    assert recorder_of("app#Deployment") != recorder_of("app")
    assert len(recorder_of("x" * 1000)) < 30
