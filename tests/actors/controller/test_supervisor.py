"""How the controller's orders reach replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.controller.supervisor import Supervisor
from greenroom.actors.messages import control as cm, queries as m
from greenroom.core import effects as fx
from greenroom.core.config import BackendConfig
from greenroom.core.lifecycle.state import Gone
from greenroom.persistence.kv import StoreNotReadableError

TAG, BACKEND = "model#1", "model"


class SlowLoop:
    """What is sent is on its way until the test says how that has ended."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ended: list[Callable[[bool], None]] = []
        self.begun: list[Coroutine[Any, Any, None]] = []

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.begun.append(coroutine)

    def go_on(self) -> None:
        """Let what was begun come to its end."""
        begun, self.begun = self.begun, []
        for each in begun:
            asyncio.run(each)

    def send(
        self,
        _address: str,
        message: Any,
        on_sent: Callable[[], None] = lambda: None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.sent.append(type(message))
        self.ended.append(lambda arrived: on_sent() if arrived else on_failed())


def supervisor_of(
    loop: Any,
    load_code: Callable[[str], bytes] = lambda _digest: b"code",
    find: Callable[[str], str] = lambda _tag: "there",
    kill: Callable[[Any, str], None] | None = None,
    locate: Callable[[str, str], Coroutine[Any, Any, str | None]] | None = None,
) -> tuple[Supervisor, Any]:
    """Return one, and its cluster; all replicas are elsewhere with ``kill`` or ``locate``."""
    release = SimpleNamespace(
        version="1", code_digest="d", code_hash="h", config={}, config_id=1, actor_options={}
    )
    record = SimpleNamespace(tag=BACKEND, deployment="", application="")
    backend = SimpleNamespace(
        record=record,
        release_of=lambda _tag: release,
        host_of=lambda _tag: "here",
        replicas={TAG: SimpleNamespace(devices={}, known_rank=None)},
        config=BackendConfig(),
    )
    backends = {BACKEND: backend}
    state = SimpleNamespace(replica_gone=Gone())
    cluster: Any = SimpleNamespace(
        backends=backends, backend_of=lambda _tag: backends.get(BACKEND), state=state
    )
    is_here = kill is None and locate is None
    members: Any = SimpleNamespace(epoch=0, is_here=lambda _host: is_here, kill=kill, locate=locate)
    checkpoints: Any = SimpleNamespace(load_code=load_code)
    made = Supervisor(
        loop,
        cluster,
        checkpoints,
        SimpleNamespace(),  # type: ignore[arg-type]  # nothing of it is needed
        members=members,
        find=find,  # type: ignore[arg-type]
        changed=lambda: None,
    )
    return made, cluster


def test_an_order_to_start_that_is_still_on_its_way_is_not_sent_once_more() -> None:
    loop = SlowLoop()
    supervisor, _ = supervisor_of(loop)
    supervisor.perform(fx.Start(TAG, BACKEND))
    supervisor.perform(fx.Start(TAG, BACKEND))
    supervisor.perform(fx.Check(TAG, 0))
    assert loop.sent == [cm.StartReplica, cm.CheckReplica]
    for arrived in (False, True):
        loop.ended[-1 if arrived else 0](arrived)
        supervisor.perform(fx.Start(TAG, BACKEND))
    assert loop.sent.count(cm.StartReplica) == 3


def test_code_that_cannot_be_read_at_present_is_read_again_and_not_taken_for_lost() -> None:
    loop = SlowLoop()
    later: list[Callable[[], None]] = []
    loop.call_later = lambda _delay_s, call: later.append(call)  # type: ignore[attr-defined]
    answers = iter([StoreNotReadableError("no answer"), b"code"])

    def load_code(_digest: str) -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    supervisor_of(loop, load_code)[0].perform(fx.Start(TAG, BACKEND))
    assert not loop.sent
    (again,) = later
    again()
    assert loop.sent == [cm.StartReplica]


def test_a_replica_that_is_gone_is_forgotten_and_not_made_anew_by_a_late_order() -> None:
    loop = SlowLoop()
    found: list[str] = []
    supervisor, cluster = supervisor_of(loop, find=lambda tag: found.append(tag) or "there")
    supervisor.perform(fx.Start(TAG, BACKEND))
    assert found == [TAG]
    cluster.state.replica_gone(TAG)
    supervisor.perform(fx.Check(TAG, 0))
    assert found == [TAG, TAG], "the core still has it"
    cluster.state.replica_gone(TAG)
    del cluster.backends[BACKEND]
    supervisor.perform(fx.Stop(TAG, 0.0))
    assert found == [TAG, TAG]


def test_a_replica_of_another_host_is_told_itself_as_well_when_it_is_killed() -> None:
    """Its end may have come while its host was cut off, and then no watch has told of it."""
    loop = SlowLoop()
    loop.watch_process = lambda *_args, **_options: lambda: None  # type: ignore[attr-defined]
    killed: list[m.Process] = []
    supervisor, cluster = supervisor_of(loop, kill=lambda process, _host: killed.append(process))
    cluster.replica_reported = lambda *_args: True
    process = m.Process(pid=7, start_ticks=7, incarnation="first")
    reported = cm.ReplicaReported(replica=TAG, process=process, state="draining")
    supervisor.reported(reported, "there")
    supervisor.perform(fx.Kill(TAG))
    assert killed == [process]
    assert loop.sent == [cm.StopReplica]


@pytest.mark.parametrize("becomes", ["found", "refused", "gone"])
def test_orders_for_another_host_wait_until_its_replica_is_found(becomes: str) -> None:
    loop = SlowLoop()
    asked: list[tuple[str, str]] = []

    async def locate(tag: str, host: str) -> str | None:
        asked.append((tag, host))
        return None if becomes == "refused" else "there"

    supervisor, cluster = supervisor_of(loop, locate=locate)
    for _ in range(2):
        supervisor.perform(fx.Start(TAG, BACKEND))
        supervisor.perform(fx.Stop(TAG, 0.0))
    if becomes == "gone":
        cluster.state.replica_gone(TAG)
    assert (len(loop.begun), loop.sent) == (1, [])
    loop.go_on()
    assert asked == [(TAG, "here")]
    sent = [cm.StartReplica, cm.StopReplica] if becomes == "found" else []
    assert loop.sent == sent, "the last of each kind"
    supervisor.perform(fx.Stop(TAG, 0.0))
    loop.go_on()
    assert len(asked) == (1 if becomes == "found" else 2), "it is asked for again"
