"""What user code logs: which query and replica each record is about, and where it goes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica.logging import JsonFormatter, TextFormatter, log_query
from greenroom.core.errors import InvalidRequestError
from greenroom.serve import schema
from greenroom.serve.context import ContextFilter
from greenroom.serve.exceptions import DeployFailedError
from tests.support.programs import python
from tests.support.queries import query
from tests.support.systems import RunningSystem, wait_until


class Talker:
    """Logs what it is asked to."""

    def __init__(self) -> None:
        logging.getLogger("mine").info("in the constructor")

    async def __call__(self, request: Any) -> str:
        what = request.url.path.rpartition("/")[2]
        if what == "fail":
            raise ValueError("as asked for")
        return str(await self.say(what))

    async def say(self, what: str) -> str:
        logger = logging.getLogger("mine")
        logger.debug("debug %s", what)
        logger.info(
            "async %s",
            what,
            extra={"answer": 42, "request_id": "mine"} if what == "extra" else {"answer": {1, 2}},
        )
        await asyncio.to_thread(logger.warning, "thread %s", what)
        return what

    def in_a_thread(self) -> str:
        logging.getLogger("greenroom.serve").info("sync")
        try:
            {}["caught"]
        except KeyError:
            logging.getLogger("mine").exception("with a traceback")
        logging.getLogger("mine").info("a\nb %s", *("too", "many"))
        return "done"

    def basic_config(self) -> None:
        logging.basicConfig(format="BASIC %(message)s")

    def own_handler(self, path: str) -> None:
        handler = logging.FileHandler(path)
        handler.addFilter(ContextFilter())
        handler.setFormatter(logging.Formatter("%(request_id)s %(backend)s %(message)s"))
        logger = logging.getLogger("own")
        logger.addHandler(handler)
        logger.info("here")


CHANGE_AMID_A_RECORD = """
import logging, sys
from greenroom.actors.replica import logging as replicas

replicas.configure({"logs_dir": sys.argv[1]}, "before")
logger = logging.getLogger("greenroom.serve")
(handler,) = logger.handlers  # as a thread has it that is about to write a record
replicas.configure({"logs_dir": sys.argv[1]}, "after")
handler.handle(logger.makeRecord("mine", logging.INFO, "", 0, "on its way", (), None))
"""


def test_a_record_that_is_on_its_way_while_settings_change_is_not_lost(tmp_path):
    python("-c", CHANGE_AMID_A_RECORD, tmp_path)
    assert not (tmp_path / "replica-before.log").read_text()
    assert (tmp_path / "replica-after.log").read_text().endswith(" -- on its way\n")


def text_of(running: RunningSystem, name: str) -> str:
    logs = running.settings.logs_dir.glob(f"replica-{name}#*.log")
    return "".join(path.read_text() for path in logs)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def the_one(text: str, message: str) -> dict[str, Any]:
    (found,) = [record for record in records(text) if record["message"] == message]
    return found


def test_json_lines_say_which_query_and_replica_they_are_about(running, deployed, name):
    config = {"encoding": "JSON", "additional_log_standard_attrs": ["lineno"]}
    deployed(serve.deployment(version="7", logging_config=config)(Talker).bind())
    headers = {"serve_multiplexed_model_id": "m1", "X-Request-Timeout-Seconds": "20"}
    headers |= {"X-Request-ID": "abc"}
    assert running.get(f"/{name}/hello", headers=headers) == (200, b"hello")
    assert running.get(f"/{name}/extra") == (200, b"extra")
    text = text_of(running, name)
    for message in ("async hello", "thread hello"):
        record = the_one(text, message)
        tag = record["replica"]
        assert tag in {
            r["tag"] for b in running.status()["backends"].values() for r in b["replicas"]
        }
        expected = {
            "logger": "mine",
            "request_id": "abc",
            "route": f"/{name}",
            "endpoint": f"{name}#Talker",
            "application": name,
            "deployment": "Talker",
            "backend": tag.rpartition("#")[0],
            "version": "7",
            "multiplexed_model_id": "m1",
        }
        assert {key: record[key] for key in expected} == expected
        assert record["lineno"] > 0
        assert 0 < record["remaining_s"] <= 20
    assert the_one(text, "async hello")["answer"] == "{1, 2}"
    extra = the_one(text, "async extra")
    assert (extra["answer"], extra["request_id"]) == (42, "mine"), "a record's own values stay"
    begun = the_one(text, "in the constructor")
    assert (begun["deployment"], "request_id" in begun) == ("Talker", False)
    assert "debug hello" not in text
    assert not {"remaining_s", "is_shadow", "multiplexed_model_id"} & set(begun)


def test_exceptions_and_odd_records_are_one_line_each(running, deployed, name):
    handle = deployed(serve.deployment(logging_config={"encoding": "JSON"})(Talker).bind())
    response = handle.in_a_thread.remote()
    assert response.result(timeout_s=20) == "done"
    lines = [line for line in text_of(running, name).splitlines() if line.startswith("{")]
    caught = the_one("\n".join(lines), "with a traceback")
    assert caught["exception"].endswith("KeyError: 'caught'")
    assert caught["request_id"] == response.request_id
    assert the_one("\n".join(lines), "sync")["logger"] == "greenroom.serve"
    assert "not all arguments converted" in text_of(running, name), "told, as ever, and not raised"


def test_queries_are_logged_when_they_have_ended_and_failures_with_their_ids(
    running, deployed, name
):
    handle = deployed(serve.deployment(logging_config={"encoding": "JSON"})(Talker).bind())
    running.get(f"/{name}/hello", headers={"X-Request-ID": "abc"})
    assert running.get(f"/{name}/fail", headers={"X-Request-ID": "def"})[0] == 500
    handle.say.remote("x").result(timeout_s=20)

    def logged() -> list[tuple[Any, ...]]:
        found = [record for record in records(text_of(running, name)) if "duration_ms" in record]
        return [(each["method"], each["path"], each["status"]) for each in found]

    ended = [("GET", f"/{name}/hello", 200), ("GET", f"/{name}/fail", 500), ("CALL", "say", 200)]
    wait_until(lambda: len(logged()) == 3, 10, "each is logged")
    assert logged() == ended
    (first, *_) = [record for record in records(text_of(running, name)) if "duration_ms" in record]
    assert first["request_id"] == "abc"
    assert first["message"].startswith(f"GET /{name}/hello 200 ")
    failed = the_one(text_of(running, name), "request def failed")
    assert (failed["level"], failed["request_id"]) == ("ERROR", "def")
    assert failed["exception"].endswith("ValueError: as asked for")


def test_without_settings_lines_are_text_and_queries_are_not_logged(running, deployed, name):
    deployed(serve.deployment(Talker).bind())
    running.get(f"/{name}/hello", headers={"X-Request-ID": "abc"})
    (line,) = [line for line in text_of(running, name).splitlines() if "async hello" in line]
    level, _, _, tag, request_id, _, message = line.split(" ", 6)
    assert (level, request_id, message) == ("INFO", "abc", "async hello")
    assert tag.startswith(f"{name}#Talker#")
    assert " GET " not in text_of(running, name)


def test_a_request_cannot_forge_lines_of_a_text_log():
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(TextFormatter(()))
    handler.addFilter(ContextFilter())
    logger = logging.getLogger("greenroom.serve")
    before, forged = logger.level, "/\nINFO 2026-01-31 forged\x1b[2J\r\x9b31m\u2028end"
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        log_query(query(1, http_method="GET", path=forged), 200, 0.1)
        logger.info("async %s", forged)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    first, *more = stream.getvalue().splitlines()
    shown = r"/\nINFO 2026-01-31 forged\x1b[2J\r\x9b31m\u2028end"
    assert first.endswith(f" GET {shown} 200 100.0ms")
    assert not [line for line in more if line.startswith("INFO 2026-01-31 forged")]
    assert "".join([first, *more]).isprintable()


def test_settings_change_while_it_serves(running, deployed, name, tmp_path):
    handle = deployed(serve.deployment(Talker).bind())
    pids = running.replica_pids(name)
    handle.say.remote("one").result(timeout_s=20)
    config = {
        "log_level": "DEBUG",
        "encoding": "JSON",
        "logs_dir": str(tmp_path / "elsewhere"),
        "enable_access_log": False,
    }
    deployed(serve.deployment(logging_config=config)(Talker).bind())
    assert running.replica_pids(name) == pids
    handle.say.remote("two").result(timeout_s=20)
    (path,) = (tmp_path / "elsewhere").iterdir()
    assert [record["message"] for record in records(path.read_text())] == [
        "debug two",
        "async two",
        "thread two",
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert "two" not in text_of(running, name)


def test_an_applications_settings_are_for_deployments_without_any(running, name):
    own = serve.deployment(name="Own", logging_config={"log_level": "ERROR"})(Talker)
    with running.as_default():
        app = serve.deployment(name="Other")(Outer).bind(own.bind())
        handle = serve.run(
            app, name=name, route_prefix=None, logging_config=schema.LoggingConfig(encoding="JSON")
        )
        assert handle.talk.remote("hello").result(timeout_s=20) == "hello"
        text = text_of(running, name)
        assert "async hello" not in text
        assert the_one(text, "outer hello")["deployment"] == "Other"
        serve.delete(name)


class Outer:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def talk(self, what: str) -> str:
        logging.getLogger("mine").info("outer %s", what)
        return str(await self.inner.say.remote(what))


def test_what_user_code_sets_up_takes_the_place_of_ours_unless_settings_say_otherwise(
    running, deployed, name
):
    handle = deployed(serve.deployment(Talker).bind())
    handle.basic_config.remote().result(timeout_s=20)
    handle.say.remote("one").result(timeout_s=20)
    assert "BASIC async one" in text_of(running, name)
    assert " -- async one" not in text_of(running, name)
    deployed(serve.deployment(version="2", logging_config={})(Talker).bind())
    handle.basic_config.remote().result(timeout_s=20)
    handle.say.remote("two").result(timeout_s=20)
    assert "BASIC async two" not in text_of(running, name)
    assert " -- async two" in text_of(running, name)


def test_handlers_of_ones_own_can_say_it_too(running, deployed, name, tmp_path):
    handle = deployed(serve.deployment(Talker).bind())
    response = handle.own_handler.remote(str(tmp_path / "own.log"))
    response.result(timeout_s=20)
    request_id, backend, message = (tmp_path / "own.log").read_text().split()
    assert (request_id, message) == (response.request_id, "here")
    assert backend in running.status()["backends"]


def test_a_folder_that_cannot_be_used_fails_the_deployment_with_the_reason(deployed, tmp_path):
    (tmp_path / "file").touch()
    config = {"logs_dir": str(tmp_path / "file")}
    with pytest.raises(DeployFailedError, match=r"logs_dir='.*/file' of logging_config cannot"):
        deployed(
            serve.deployment(logging_config=config, max_constructor_retry_count=1)(Talker).bind()
        )


@pytest.mark.parametrize("formatter", [TextFormatter(()), JsonFormatter(())])
@pytest.mark.parametrize(("level", "has_ours"), [("INFO", False), ("DEBUG", True)])
def test_tracebacks_show_frames_of_ours_in_debug_alone(formatter, level, has_ours):
    logger = logging.getLogger("greenroom.serve")
    before = logger.level
    try:
        serve.get_deployment_handle("")
    except InvalidRequestError as error:
        logger.setLevel(level)
        try:
            found = formatter.formatException((type(error), error, error.__traceback__))
        finally:
            logger.setLevel(before)
    assert "test_logging.py" in found
    assert ("in get_deployment_handle" in found) == has_ours
