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
from greenroom.core.lifecycle.replicas import Replica, ReplicaState
from greenroom.core.lifecycle.state import Gone
from greenroom.core.records import BackendRecord, Release
from greenroom.persistence.kv import CorruptValueError, StoreNotReadableError
from tests.support.lone_loop import LoneLoop

TAG, BACKEND = "model#1", "model"


def kinds(loop: LoneLoop) -> list[type]:
    """Return the classes of what was sent, none of which has arrived unless the test says so."""
    return [type(message) for _, message in loop.sent]


def supervisor_of(
    loop: Any,
    load_code: Callable[[str], bytes] = lambda _digest: b"code",
    find: Callable[[str], str] = lambda _tag: "there",
    kill: Callable[[Any, str], None] | None = None,
    locate: Callable[[str, str], Coroutine[Any, Any, str | None]] | None = None,
    cause_of_end: Callable[..., Coroutine[Any, Any, str]] | None = None,
) -> tuple[Supervisor, Any]:
    """Return one, and its cluster; all replicas are elsewhere with ``kill`` or ``locate``."""
    release = Release(code_digest="d", code_hash="h", config={})
    backend = SimpleNamespace(
        record=BackendRecord(tag=BACKEND, releases=(release,)),
        replicas={TAG: SimpleNamespace(devices={}, known_rank=None, host="here", release=1)},
        config=BackendConfig(),
    )
    backends = {BACKEND: backend}
    state = SimpleNamespace(backends=backends, gone=Gone())
    cluster: Any = SimpleNamespace(backend_of=lambda _tag: backends.get(BACKEND), state=state)
    is_here = kill is None and locate is None
    members: Any = SimpleNamespace(epoch=0, is_here=lambda _host: is_here, kill=kill, locate=locate)
    members.cause_of_end = cause_of_end
    checkpoints: Any = SimpleNamespace(load_code=load_code)
    made = Supervisor(
        loop,
        cluster,
        checkpoints,
        SimpleNamespace(remove=lambda _process: None),  # type: ignore[arg-type]
        members=members,
        find=find,  # type: ignore[arg-type]
        changed=lambda: None,
    )
    return made, cluster


def test_an_order_to_start_that_is_still_on_its_way_is_not_sent_once_more():
    loop = LoneLoop()
    supervisor, _ = supervisor_of(loop)
    supervisor.perform(fx.Start(TAG, BACKEND))
    supervisor.perform(fx.Start(TAG, BACKEND))
    supervisor.perform(fx.CheckReplica(replica=TAG, check_id=0))
    assert kinds(loop) == [cm.StartReplica, cm.CheckReplica]
    for arrived in (False, True):
        (loop.outbox[-1].arrived if arrived else loop.outbox[0].failed)()
        supervisor.perform(fx.Start(TAG, BACKEND))
    assert kinds(loop).count(cm.StartReplica) == 3


def test_code_that_cannot_be_read_at_present_is_read_again_and_not_taken_for_lost():
    loop = LoneLoop()
    answers = iter([StoreNotReadableError("no answer"), b"code"])

    def load_code(_digest: str) -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    supervisor_of(loop, load_code)[0].perform(fx.Start(TAG, BACKEND))
    assert not loop.sent
    (delay_s,) = loop.due()
    loop.pass_time(delay_s)
    assert kinds(loop) == [cm.StartReplica]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_folder_that_cannot_be_read_at_present_is_not_taken_for_lost(is_lost):
    def load_code(_digest: str) -> bytes:
        raise CorruptValueError("damaged") if is_lost else StoreNotReadableError("no answer")

    loop, lost = LoneLoop(), set[tuple[str, str]]()
    supervisor, cluster = supervisor_of(loop, load_code)
    cluster.state.lost = lost
    supervisor.fetch(cm.FetchFolder(replica=TAG, digest="d"), "there")
    answers = [message.error for _, message in loop.sent]
    found = (["damaged"], {("code", "d")}) if is_lost else ([], set())
    assert (answers, lost) == found, "it asks again"


def test_a_replica_that_is_gone_is_forgotten_and_not_made_anew_by_a_late_order():
    loop = LoneLoop()
    found: list[str] = []
    supervisor, cluster = supervisor_of(loop, find=lambda tag: found.append(tag) or "there")
    supervisor.perform(fx.Start(TAG, BACKEND))
    assert found == [TAG]
    cluster.state.gone.replica(TAG)
    supervisor.perform(fx.CheckReplica(replica=TAG, check_id=0))
    assert found == [TAG, TAG], "the core still has it"
    cluster.state.gone.replica(TAG)
    del cluster.state.backends[BACKEND]
    supervisor.perform(fx.StopReplica(replica=TAG, drain_s=0.0))
    assert found == [TAG, TAG]


def test_a_replica_of_another_host_is_asked_itself_as_well_when_it_is_killed():
    """Its end may have come while its host was cut off, and then no watch has told of it."""
    loop = LoneLoop()
    killed: list[m.Process] = []
    supervisor, cluster = supervisor_of(loop, kill=lambda process, _host: killed.append(process))
    cluster.replica_reported = lambda *_args: True
    process = m.Process(pid=7, start_ticks=7, incarnation="first")
    reported = cm.ReplicaReported(replica=TAG, process=process, state="draining")
    supervisor.reported(reported, "there")
    supervisor.perform(fx.Kill(TAG))
    assert killed == [process]
    assert kinds(loop) == [cm.StopReplica]


def test_what_a_proxy_calls_gone_is_killed_and_not_what_follows_it():
    killed: list[m.Process] = []
    made, cluster = supervisor_of(LoneLoop(), kill=lambda process, _host: killed.append(process))
    cluster.replica_reported = lambda *_args: True
    process = m.Process(pid=7, start_ticks=7, incarnation="second")
    made.reported(cm.ReplicaReported(replica=TAG, process=process, state="running"), "there")
    for incarnation, expected in (("first", []), ("second", [process])):
        made.replica_gone(cm.ReplicaLost(replica=TAG, incarnation=incarnation))
        assert killed == expected


@pytest.mark.parametrize("becomes", ["found", "refused", "gone"])
def test_orders_for_another_host_wait_until_its_replica_is_found(becomes):
    loop = LoneLoop()
    loop.outside.is_remote = True
    asked: list[tuple[str, str]] = []
    is_answered = asyncio.Event()

    async def locate(tag: str, host: str) -> str | None:
        asked.append((tag, host))
        await is_answered.wait()
        return None if becomes == "refused" else "there"

    supervisor, cluster = supervisor_of(loop, locate=locate)
    for _ in range(2):
        supervisor.perform(fx.Start(TAG, BACKEND))
        supervisor.perform(fx.StopReplica(replica=TAG, drain_s=0.0))
    if becomes == "gone":
        cluster.state.gone.replica(TAG)
    assert kinds(loop) == []
    assert asked == [(TAG, "here")]
    is_answered.set()
    sent = [cm.StartReplica, cm.StopReplica] if becomes == "found" else []
    assert kinds(loop) == sent, "the last of each kind"
    assert len(loop.outside.watching) == (becomes == "found")
    supervisor.perform(fx.StopReplica(replica=TAG, drain_s=0.0))
    loop.pass_time(0)
    assert len(asked) == (1 if becomes == "found" else 2), "it is asked for again"


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_replica_of_another_host_that_dies_before_its_first_report_has_failed(
    is_dead: bool,
) -> None:
    """Else a new process is made at each repeat of the order, and no pause is kept."""
    loop = LoneLoop()
    loop.outside.is_remote = True
    located, exited = [], list[tuple[Any, ...]]()

    async def locate(tag: str, _host: str) -> str:
        located.append(tag)
        return f"process {len(located)}"

    async def cause_of_end(_tag: str, at: Any, _host: str) -> str:
        assert at == "process 1", "else nobody there knows which process"
        return "exit code 3"

    supervisor, cluster = supervisor_of(loop, locate=locate, cause_of_end=cause_of_end)
    cluster.state.backends[BACKEND].replicas[TAG] = Replica(tag=TAG, state=ReplicaState.STARTING)
    cluster.replica_exited = lambda *of: exited.append(of)
    supervisor.perform(fx.Start(TAG, BACKEND))
    loop.outbox[0].failed()
    loop.outside.watching[0](is_dead)
    loop.pass_time(0.0)
    assert [(tag, cause) for tag, _, cause in exited] == [(TAG, "exit code 3")] * is_dead
    supervisor.perform(fx.Start(TAG, BACKEND))
    assert [to for to, _ in loop.sent] == ["process 1", "process 2"]
    assert len(loop.outside.watching) == 1, "the first one is watched no more"


class Ending:
    """A replica that ends by a ``cause``, which its host tells a second later."""

    def __init__(self, cause: str, worn: str = "") -> None:
        self.loop = LoneLoop()
        self.process = m.Process(pid=7, start_ticks=7, incarnation="first")

        async def cause_of_end(*_: Any) -> str:
            await asyncio.sleep(1.0)
            return cause

        self.supervisor, cluster = supervisor_of(self.loop, cause_of_end=cause_of_end)
        replica: Any = Replica(tag=TAG, state=ReplicaState.RUNNING, worn=worn)
        cluster.state.backends[BACKEND].replicas[TAG] = replica
        cluster.replica_reported = cluster.replica_exited = lambda *_args: True
        reported = cm.ReplicaReported(replica=TAG, process=self.process, state="running")
        self.supervisor.reported(reported, "there")

    def ask(self, proxy: str) -> None:
        question = cm.DescribeEnd(request_id=f"by {proxy}", replica=TAG, address=None)
        self.supervisor.describe_end(question, proxy)

    def described(self) -> list[tuple[str, str, str]]:
        """Return the proxies that have heard of it, as what, and the cause."""
        return [(to, each.request_id, each.cause) for to, each in self.loop.sent]


def test_proxies_hear_why_a_replica_ended_once_the_controller_knows():
    ending = Ending("SIGSEGV")
    ending.ask("early")  # it has seen the end first
    ending.ask("early")
    ending.loop.end(ending.process)
    ending.loop.pass_time(0.5)
    ending.ask("later")
    assert ending.described() == []
    ending.loop.pass_time(1.0)
    ending.ask("late")
    proxies = ("early", "later", "late")
    assert ending.described() == [(proxy, f"by {proxy}", "SIGSEGV") for proxy in proxies]


@pytest.mark.parametrize(
    ("worn", "cause", "message"),
    [
        ("out of memory: it has 90 MiB", "exit code 0", "out of memory: it has 90 MiB"),
        ("max_memory_bytes: it has", "out of memory: SIGKILL", "out of memory: SIGKILL"),
        ("max_age_s: it has run", "SIGSEGV", "max_age_s: it has run"),
    ],
)
def test_what_a_replica_had_said_goes_before_its_exit_code_but_not_before_the_kernel(
    worn, cause, message
):
    ending = Ending(cause, worn)
    ending.loop.end(ending.process)
    ending.loop.pass_time(1.0)
    ending.ask("proxy")
    assert ending.described() == [("proxy", "by proxy", message)]


def test_proxies_hear_at_once_of_a_replica_that_has_said_itself_why_it_ends(caplog):
    caplog.set_level("INFO")
    ending = Ending("exit code 0", "out of memory: it has 90 MiB")
    ending.ask("proxy")
    ending.loop.end(ending.process)
    assert ending.described() == [("proxy", "by proxy", "out of memory: it has 90 MiB")]
    assert caplog.messages[-1].endswith("(pid 7) is gone: out of memory: it has 90 MiB")


def test_of_a_replica_that_is_not_known_proxies_hear_nothing():
    loop = LoneLoop()
    supervisor, _ = supervisor_of(loop)
    question = cm.DescribeEnd(request_id="q", replica="other#1", address=None)
    supervisor.describe_end(question, "proxy")
    assert loop.sent == []
