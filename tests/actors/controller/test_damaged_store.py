"""What a controller at work does when its store finds that something was lost meanwhile."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from greenroom.actors.controller.active import ActiveController
from greenroom.actors.controller.held_store import HeldStore
from greenroom.actors.messages.admin import request_of
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import records_of
from greenroom.actors.runtime.settings import read_settings
from greenroom.core import operations as ops
from greenroom.persistence import filesystem
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.locations import location_at
from tests.support.lone_loop import LoneLoop


def damage(folder: Path, value: bytes) -> None:
    for path in folder.rglob("log-*"):
        content = path.read_bytes()
        assert value in content
        path.write_bytes(content.replace(value, value[::-1]))


def test_records_that_are_lost_when_a_log_is_begun_are_saved_again(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "SPARE", -(10**9))  # so each change begins a log
    settings = read_settings({}, state_dir=str(tmp_path))
    loop = LoneLoop()
    client: Any = SimpleNamespace(addressDetails=SimpleNamespace(host="127.0.0.1"))
    store = location_at(settings.store_name).open()
    held = HeldStore(settings, Pulse(), store, None, lambda *_: None)
    find: Any = lambda tag: tag  # noqa: E731
    records = records_of(settings)
    controller = ActiveController(loop, settings, this_process(), records, held, find=find)

    def ask(asked: ops.Operation, request_id: str) -> Any:
        controller.take(request_of(asked, request_id), client)
        (reply,) = [each for _, each in loop.sent if getattr(each, "request_id", "") == request_id]
        assert not reply.error_kind, reply
        return reply.value

    digest = "abc" * 21 + "d"
    ask(ops.CreateToken(name="ci", digest=digest, holder_role="viewer"), "1")
    config = {"num_replicas": 1}
    ask(ops.CreateBackend(tag="b", code=b"some code", code_hash="h", config=config), "2")
    for value in (digest.encode(), b"some code"):
        damage(tmp_path / "store", value)
    ask(ops.CreateToken(name="other", digest="0" * 64, holder_role="viewer"), "3")
    assert [key for key, _ in held.checkpoints.lost] == ["code"], "which only a deploy brings again"
    assert ask(ops.ListMissing(digests=tuple(name for _, name in held.checkpoints.lost)), "4")
    controller.close()
    with closing(location_at(settings.store_name).open()) as store:
        assert Checkpoints(store).load("token").keys() == {"ci", "other"}
