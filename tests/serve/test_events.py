"""Log records as events: one line for each, as text and as JSON."""

from __future__ import annotations

import json
import time

import pytest

from greenroom.serve.cli.logs import Event, Line, event, events_of


@pytest.fixture(autouse=True)
def far_from_greenwich():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TZ", "UTC-2")
        time.tzset()
        yield
    time.tzset()


def test_a_record_is_an_event_with_the_time_in_utc():
    lines = [
        Line("controller", "2026-01-31 14:00:00,393 77 INFO replica a#b (pid 5) runs"),
        Line("host", "2026-01-31 14:00:01,004 WARNING of Thespian's logger"),
        Line("front", "[2026-01-31 14:00:02 +0200] [78] [ERROR] of gunicorn"),
    ]
    assert events_of(lines) == [
        Event("2026-01-31T12:00:00.393Z", "INFO", "controller", 77, "replica a#b (pid 5) runs"),
        Event("2026-01-31T12:00:01.004Z", "WARNING", "host", None, "of Thespian's logger"),
        Event("2026-01-31T12:00:02.000Z", "ERROR", "front", 78, "of gunicorn"),
    ]


def test_a_traceback_belongs_to_its_record_and_what_was_printed_is_an_event_of_its_own():
    lines = ["printed", "2026-01-31 14:00:00,393 77 ERROR failed", "  Traceback ...", "    File"]
    printed, failed = events_of([Line("host", each) for each in lines])
    assert (printed.level, printed.message) == ("INFO", "printed")
    assert failed.message == "failed\n  Traceback ...\n    File"
    assert failed.shown("text") == (
        "2026-01-31T12:00:00.393Z ERROR host: failed\\n  Traceback ...\\n    File"
    )
    assert json.loads(failed.shown("json")) == {
        "time": "2026-01-31T12:00:00.393Z",
        "level": "ERROR",
        "part": "host",
        "pid": 77,
        "message": "failed\n  Traceback ...\n    File",
    }


def test_an_event_is_one_line_whatever_is_in_it():
    for log_format in ("text", "json"):
        assert event("host", "a\nb\r\nc\x1b[2J\x9b31m\u2028").shown(log_format).isprintable()


def test_digits_that_are_no_date_are_what_was_printed():
    text = "2026-99-31 14:00:00,393 77 INFO not a record"
    (printed, after) = events_of([Line("host", text), Line("host", "after")])
    assert (printed.message, after.message) == (text, "after")
