"""The controller without a store that it can write: questions are answered, changes refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from greenroom.actors.controller.read_only import ReadOnlyController
from greenroom.actors.messages.admin import RequestReply, request_of
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core import operations as ops
from greenroom.core.records import BackendRecord, Release
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import StoreNotWritableError
from greenroom.persistence.locations import location_at
from tests.support.lone_loop import LoneLoop

FULL = StoreNotWritableError("cannot write to the store: the disk is full. Nothing was changed")


def ask(settings: HostSettings, *asked: ops.Operation) -> list[RequestReply]:
    loop = LoneLoop()
    controller = ReadOnlyController(loop, settings, this_process(), Pulse(), FULL)
    nobody: Any = None
    for number, each in enumerate(asked):
        controller.take(request_of(each, str(number)), nobody)
    return [reply for _, reply in loop.sent]


def with_a_backend(folder: Path) -> HostSettings:
    settings = read_settings({}, state_dir=str(folder))
    with contextlib.closing(location_at(settings.store_name).open()) as store:
        release = Release(code_hash="h", code_digest="d", config={"num_replicas": 2})
        record = BackendRecord(tag="b", releases=(release,))
        Checkpoints(store).save({("backend", "b"): record})
    return settings


def test_questions_are_answered_from_what_can_be_read(tmp_path):
    settings = with_a_backend(tmp_path)
    config, backends, history, unknown, change, hosts = ask(
        settings,
        ops.GetBackendConfig(tag="b"),
        ops.ListBackends(),
        ops.ListHistory(),
        ops.GetBackendConfig(tag="c"),
        ops.DeleteBackend(tag="b"),
        ops.ListHosts(),
    )
    assert (config.value["num_replicas"], list(backends.value)) == (2, ["b"])
    assert (history.value, history.error) == ([], "")
    assert unknown.error_kind == "UnknownNameError"
    assert (change.error_kind, "Nothing was changed" in change.error) == (
        "StateNotSavedError",
        True,
    )
    assert hosts.error_kind == "StateNotReadableError"


def test_where_nothing_can_be_read_a_question_is_answered_so_and_nothing_of_changes(tmp_path):
    settings = read_settings({}, state_dir=str(tmp_path))
    (found, status) = ask(settings, ops.ListBackends(), ops.GetStatus())
    assert found.error_kind == "StateNotReadableError"
    assert found.error.startswith("the state cannot be read: ")
    assert "changed" not in found.error
    assert status.value["saving"]["error"] == str(FULL)
