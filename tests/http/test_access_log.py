"""The access log: complete lines, soon enough, and never in the way."""

import asyncio
import json
import os
from datetime import UTC, datetime

import pytest

from greenroom.actors.runtime.logs import rotate_logs
from greenroom.http_front.access_log import AccessLog, Entry, line
from tests.support import virtual_time

pytestmark = pytest.mark.anyio

ENTRY = Entry(1700000000.1239, "id", "GET", "/", 200, 0.0123456, 7, ("127.0.0.1", 5000))


def test_a_line_is_one_json_object_with_all_that_is_known():
    assert json.loads(line(ENTRY)) == {
        "time": "2023-11-14T22:13:20.123Z",
        "request_id": "id",
        "method": "GET",
        "path": "/",
        "status": 200,
        "duration_ms": 12.346,
        "bytes": 7,
        "client": "127.0.0.1:5000",
    }


@pytest.mark.parametrize(
    "text",
    [
        *('/"', "/\n", "/ä€", "/\ufffd", "/\\"),
        *("\xe9", '","forged":"yes', "\x1b[2J", "\ud800", "é" * 5000),
    ],
)
def test_whatever_is_in_the_path_or_the_client_the_line_stays_one_line_of_json(text):
    written = line(ENTRY._replace(path=text, client=(text, 0)))
    assert written.isascii()
    assert written.count("\n") == 1
    report = json.loads(written)
    assert (report["path"], report["client"]) == (text, f"{text}:0")
    assert report.keys() == json.loads(line(ENTRY)).keys()


def test_a_request_is_in_the_file_within_a_quarter_of_a_second(app):
    async def ask():
        await app.call("GET", "/watched")
        await asyncio.sleep(0.25)
        return (app.settings.logs_dir / "access.log").read_text()

    assert virtual_time.run(ask()).count("\n") == 1
    entry = app.log()[0]
    assert (entry["path"], entry["status"], entry["bytes"]) == ("/watched", 200, 2)
    now = datetime.now(UTC)
    assert abs((now - datetime.fromisoformat(entry["time"][:-1] + "+00:00")).total_seconds()) < 60


def test_refusals_are_logged_with_their_request_ids(app):
    app.rebuild(max_body_bytes=1)
    answer = app.ask("POST", "/large", body=b"12", headers=((b"host", b"x"), (b"expect", b"x")))
    entry = app.log()[0]
    assert (entry["status"], entry["request_id"]) == (413, answer["x-request-id"])
    assert entry["bytes"] == len(answer.body)


def test_two_workers_append_whole_lines_to_the_same_file(tmp_path):
    async def fill(path):
        logs = [AccessLog(path), AccessLog(path)]
        for number in range(1000):
            for log in logs:
                log.add(ENTRY._replace(path=f"/{number}"))
            if number % 7 == 0:
                logs[number % 2].flush()
        for log in logs:
            log.flush()

    path = tmp_path / "logs" / "access.log"
    asyncio.run(fill(path))
    assert len([json.loads(text) for text in path.read_text().splitlines()]) == 2000


async def test_a_burst_is_written_before_it_grows_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("greenroom.http_front.access_log.MOST_WAITING", 10)
    log = AccessLog(tmp_path / "access.log")
    for _ in range(25):
        log.add(ENTRY)
    written = (tmp_path / "access.log").read_text().count("\n")
    log.flush()
    assert written >= 10


def test_a_full_disk_does_not_stop_the_serving_and_is_reported_once(app, caplog):
    app.settings.logs_dir.mkdir()
    full = os.stat("/dev/full")
    os.mknod(app.settings.logs_dir / "access.log", full.st_mode, full.st_rdev)
    for _ in range(3):
        assert app.ask().status == 200
        app.front.access_log.flush()
    reports = [record for record in caplog.records if "access log" in record.getMessage()]
    assert len(reports) == 1
    assert "No space left" in reports[0].getMessage()


def test_a_log_folder_that_cannot_be_made_does_not_stop_the_serving(app, caplog):
    app.settings.logs_dir.write_text("a file where the folder should be")
    assert app.ask().status == 200
    app.front.access_log.flush()
    assert "cannot write the access log" in caplog.text


async def test_after_a_torn_write_the_next_line_begins_on_its_own(tmp_path, monkeypatch):
    real_write = os.write
    outcomes = iter(["part", "fail"])

    def tearing_write(fd, content):
        outcome = next(outcomes, "whole")
        if outcome == "part":
            return real_write(fd, bytes(content)[:10])
        if outcome == "fail":
            raise OSError(28, "No space left on device")
        return real_write(fd, content)

    log = AccessLog(tmp_path / "access.log")
    monkeypatch.setattr("greenroom.http_front.access_log.os.write", tearing_write)
    log.add(ENTRY)
    log.flush()
    log.add(ENTRY)
    log.flush()
    torn, whole = (tmp_path / "access.log").read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["request_id"] == "id"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


async def test_a_log_that_is_rotated_under_its_workers_loses_no_line(tmp_path):
    path = tmp_path / "access.log"
    ids = [f"request-{number}" for number in range(400)]

    logs = [AccessLog(path) for _ in range(3)]
    for number, request_id in enumerate(ids):
        log = logs[number % 3]
        log.add(entry(request_id))
        log.flush()
        rotate_logs(tmp_path, 2000, 100)
    for log in logs:
        log.flush()
    parts = [each.read_text() for each in tmp_path.iterdir()]
    found = [json.loads(line)["request_id"] for part in parts for line in part.splitlines()]
    assert sorted(found) == sorted(ids)
    assert len(parts) > 10
    assert max(map(len, parts)) < 3000


@pytest.mark.parametrize("files", [0, 1, 2])
async def test_of_a_rotated_log_so_many_files_are_kept(tmp_path, files):
    path = tmp_path / "access.log"

    log = AccessLog(path)
    for number in range(50):
        log.add(entry(str(number)))
        log.flush()
        rotate_logs(tmp_path, 1000, files)
    log.add(entry("last"))
    log.flush()
    assert names(tmp_path) == ["access.log", *(f"access.log.{n}" for n in range(1, files + 1))]
    assert '"last"' in path.read_text()


async def test_a_log_that_was_moved_or_deleted_is_made_anew(tmp_path):
    path = tmp_path / "access.log"

    log = AccessLog(path)
    for request_id, then in (("a", path.unlink), ("b", lambda: path.rename(tmp_path / "b"))):
        log.add(entry(request_id))
        log.flush()
        then()
    log.add(entry("c"))
    log.flush()
    assert json.loads(path.read_text())["request_id"] == "c"
    assert json.loads((tmp_path / "b").read_text())["request_id"] == "b"


def entry(request_id):
    return ENTRY._replace(request_id=request_id)
