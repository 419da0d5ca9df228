"""A world for a Cluster to run: replicas' processes, proxies, a store, a clock, and crashes.

It does what the controller's shell does, in the same order: advance, save, and only then send. A
replica is a process with a tag, found by it again by a new controller; a proxy keeps its tables
while controllers come and go. Nothing happens unless the test says so: messages wait until
:meth:`World.deliver`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from greenroom.core.cluster.cluster import Cluster
from greenroom.core.effects import (
    AskPolicy,
    CheckReplica,
    Effect,
    Kill,
    ReconfigureReplica,
    Start,
    StopReplica,
)
from greenroom.core.lifecycle.history import Author
from greenroom.core.lifecycle.placement import anywhere
from greenroom.core.lifecycle.releases import numbered
from greenroom.core.lifecycle.replicas import Report
from greenroom.core.lifecycle.state import KINDS, Change
from greenroom.core.long_poll import NOTHING_SEEN, Update

BROKEN = b"raise"  # code that begins with this cannot start
UNLOADABLE = BROKEN + b" at import"  # and no further try helps
REFUSED = "refused"  # a user_config on which reconfigure raises


class CrashError(Exception):
    """The controller died."""


class Spec(NamedTuple):
    """A deployment, as a deploy call describes it."""

    name: str
    code: bytes
    config: dict[str, Any]
    version: str | None = None
    actor_options: dict[str, Any] = {}  # noqa: RUF012  # never changed

    @property
    def code_hash(self) -> str:
        """Of all before "as", such as that of ``b"one as other bytes"``."""
        return f"hash-of-{self.code.decode().partition(' as ')[0]}"

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of an operation's DeploymentSpec."""
        return {**self._asdict(), "code_hash": self.code_hash}


@dataclass(eq=False)
class Process:
    """One replica's process."""

    tag: str
    pid: int
    code: bytes = b""
    state: str = "idle"
    config_id: int = 0
    alive: bool = True
    stuck: bool = False  # takes no message, as after SIGSTOP; they wait in its mailbox
    mailbox: list[tuple[Effect, Any]] = field(default_factory=list)  # with their settings
    sick: bool = False  # fails its health checks
    failure: tuple[str, bytes | None] = ("boom", b"pickled boom")  # of its constructor
    refused: bool = False  # its reconfigure raised on the newest settings
    reconfigured: list[int] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)  # of record_autoscaling_stats
    worn: str = ""

    def report(self, check_id: int = 0) -> Report:
        error, exception = self.failure if self.state == "failed" else ("", None)
        if self.sick and check_id:
            error = "boom"
        if self.refused and not check_id:
            error, exception = "no such", b"pickled no such"
        return Report(
            replica=self.tag,
            process=self,
            state=self.state,
            queries_at=f"address of {self.pid}",
            config_id=self.config_id,
            check_id=check_id,
            error=error,
            exception=exception,
            lasts=self.state == "failed" and self.code == UNLOADABLE,
            stats=self.stats,
            worn=self.worn,
        )


@dataclass(eq=False)
class Proxy:
    """What a proxy holds."""

    name: str
    seen: int = NOTHING_SEEN
    tables: dict[str, Any] = field(default_factory=dict)

    def take(self, update: Update) -> None:
        if update.upto < self.seen:
            return
        if update.complete:
            self.tables.clear()
        for key, (_, table) in update.snapshots.items():
            if table is None:
                self.tables.pop(key, None)
            else:
                self.tables[key] = table
        self.seen = update.upto


NOBODY = Author()


def made(
    cluster: Cluster,
    make: Callable[[Cluster], Any],
    author: Author = NOBODY,
    what: str = "a request",
) -> Any:
    """Make a request's change, as the controller does; return the answer."""
    if repeated := cluster.state.history.answered(author.request_id):
        return repeated.answer
    change = make(cluster)
    return cluster.state.apply(author, what, change, 7.0) if isinstance(change, Change) else change


class World:
    """A cluster and all that it acts on."""

    def __init__(self, proxies: int = 1, capacity: dict[str, float] | None = None) -> None:
        self.capacity = capacity
        self.now = 1000.0
        self.epoch = 0
        self.records: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.code: dict[str, bytes] = {}
        self.processes: dict[str, Process] = {}
        self.proxies = [Proxy(f"proxy {i}") for i in range(proxies)]
        self.crash_at: str | None = None  # "before save", "after save" or "amid effects"
        self.effects: list[Effect] = []  # all that were performed
        self._pids = itertools.count(1)
        self._names = itertools.count(proxies)
        self._requests = itertools.count(1)
        self.boot()

    # --- The controller ---------------------------------------------------------------------------

    def boot(self) -> None:
        """Start a controller anew from what was saved; all that was under way to it is lost."""
        self.epoch += 1
        records = {kind: dict(records) for kind, records in self.records.items()}
        self.cluster = Cluster(records, self.epoch, self.now, anywhere(self.capacity))
        self._addresses: dict[str, Process] = {}
        self.watched: dict[str, Process] = {}
        self.reports: list[Report] = []
        self._exits: list[tuple[str, Process, str]] = []
        self._inbox: list[tuple[Proxy, Update]] = []
        for proxy in self.proxies:
            self.listen(proxy)

    def request(
        self, make: Callable[[Cluster], Any], author: Author = NOBODY, what: str = "a request"
    ) -> Any:
        """Make a request and its turn; a client repeats it when the controller died meanwhile."""
        while True:
            try:
                answer = made(self.cluster, make, author, what)
                self.turn()
            except CrashError:
                continue
            return answer

    def change(
        self, make: Callable[[Cluster], Any], what: str = "a change", request: str = ""
    ) -> Any:
        """Make a request as the controller does: once per id, with an entry in the history."""
        author = Author("ada", "10.0.0.1", request or f"request {next(self._requests)}")
        return self.request(make, author, what)

    def complete(self, change: Callable[[Cluster], Any]) -> Any:
        """Make a request, and let time pass until all is as it should be."""
        answer = self.request(change)
        self.converge()
        return answer

    def turn(self) -> None:
        """Advance, save, perform, push: as the shell does after each message."""
        effects = self.cluster.advance(self.now, wall_now=self.now)
        changes = self.cluster.take_changes()
        self._crash("before save")
        for (kind, name), record in changes.puts.items():
            (self.code if kind == "code" else self.records[kind])[name] = record
        for kind, name in changes.deletes:
            (self.code if kind == "code" else self.records[kind]).pop(name, None)
        self._crash("after save")
        for number, effect in enumerate(effects):
            if number == 1:
                self._crash("amid effects")
            self.perform(effect)
        self._inbox += self.cluster.state.long_poll.take_updates()

    def _crash(self, point: str) -> None:
        if self.crash_at == point:
            self.crash_at = None
            self.boot()
            raise CrashError

    # --- Effects ----------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        self.effects.append(effect)
        if isinstance(effect, AskPolicy):
            return  # the test answers
        if isinstance(effect, Kill) and effect.replica in self.watched:
            self.die(effect.replica)
            return
        process = self._addresses.get(effect.replica)
        if process is None:
            process = self.processes.get(effect.replica)
            if process is None or not process.alive:
                process = Process(effect.replica, next(self._pids))
                self.processes[effect.replica] = process
            self._addresses[effect.replica] = process
        settings = self._settings(effect)
        if process.stuck:
            process.mailbox.append((effect, settings))
        elif process.alive:
            self._receive(process, effect, settings)

    def _settings(self, effect: Effect) -> Any:
        """Return what the order carries: as it is when it is sent, not when it is taken."""
        if isinstance(effect, Start):
            record = self.records["backend"][effect.backend]
            return numbered(record, record.replicas[effect.replica].release)
        return None

    def _receive(self, process: Process, effect: Effect, settings: Any) -> None:
        if isinstance(effect, Start):
            release = settings
            if process.state == "idle":
                process.state, process.code = "starting", self.code[release.code_digest]
                process.config_id = release.config_id
            elif release.config_id > process.config_id:
                self._reconfigure(process, release.config, release.config_id)
            self.report(process)
        elif isinstance(effect, ReconfigureReplica):
            self._reconfigure(process, effect.config, effect.config_id)
            self.report(process)
        elif isinstance(effect, CheckReplica):
            self.report(process, effect.check_id)
        else:  # a stop; or Kill where the controller has not heard of the process
            process.state = "draining"
            self.report(process)

    def _reconfigure(self, process: Process, config: Any, config_id: int) -> None:
        process.config_id = config_id
        process.reconfigured.append(config_id)
        process.refused = config["user_config"] == REFUSED

    def report(self, process: Process, check_id: int = 0) -> None:
        self.reports.append(process.report(check_id))

    # --- What happens out there -------------------------------------------------------------------

    def die(self, tag: str, cause: str = "") -> None:
        """End a replica's process, as by kill -9; ``cause`` is what its host tells of that."""
        process = self.processes.pop(tag, None)
        if process is None:
            return
        process.alive = False
        if self.watched.get(tag) is process:
            self._exits.append((tag, process, cause))

    def thaw(self) -> None:
        """Let stuck processes go on."""
        for process in self.processes.values():
            process.stuck = False
            while process.mailbox:
                self._receive(process, *process.mailbox.pop(0))

    def work(self) -> None:
        """Let constructors return, and processes that drain end."""
        for process in list(self.processes.values()):
            if process.stuck:
                continue
            if process.state == "starting":
                process.state = "running" if self.construct(process) else "failed"
                self.report(process)
            elif process.state == "draining":
                self.die(process.tag)

    def construct(self, process: Process) -> bool:
        """Run the constructor of a process's code; return whether it comes up."""
        return not process.code.startswith(BROKEN)

    def go_on(self, times: int, seconds: float = 0.0) -> None:
        """Deliver everything and let processes work, so often and so far apart."""
        for _ in range(times):
            self.flush()
            self.work()
            self.now += seconds

    def deliver(self) -> bool:
        """Deliver what is under way, each message with its own turn; False when nothing was."""
        reports, self.reports = self.reports, []
        exits, self._exits = self._exits, []
        inbox, self._inbox = self._inbox, []
        steps: list[Callable[[], None]] = [partial(self._reported, report) for report in reports]
        steps += [partial(self._exited, *each) for each in exits]
        for proxy, update in inbox:
            steps.append(lambda proxy=proxy, update=update: self._deliver(proxy, update))
        for step in steps:
            try:
                step()
                self.turn()
            except CrashError:
                return True
        return bool(steps)

    def _reported(self, report: Report) -> None:
        tag, process = report.replica, report.process
        if self.watched.get(tag) is not process:
            self._addresses[tag] = self.watched[tag] = process
            if not process.alive:
                self._exits.append((tag, process, ""))
        known = self.cluster.replica_reported(report, self.now)
        if not known and report.state != "draining" and process.alive:
            self._receive(process, StopReplica(replica=tag, drain_s=0.0), None)

    def _exited(self, tag: str, process: Process, cause: str) -> None:
        if self.watched.get(tag) is process:
            del self.watched[tag], self._addresses[tag]
            self.cluster.replica_exited(tag, self.now, cause)

    def _deliver(self, proxy: Proxy, update: Update) -> None:
        if proxy in self.proxies:
            proxy.take(update)
            self.listen(proxy)

    def listen(self, proxy: Proxy) -> None:
        """Let a proxy ask for what it lacks."""
        self.cluster.state.long_poll.listen(proxy.name, (1, 1, proxy.name), proxy.seen, proxy)

    def restart_proxy(self, index: int = 0) -> None:
        """Replace a proxy by one that holds nothing."""
        self.cluster.state.long_poll.gone(self.proxies[index].name)
        self.proxies[index] = Proxy(f"proxy {next(self._names)}")
        self.listen(self.proxies[index])

    # --- Time -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Deliver until nothing is under way."""
        try:
            self.turn()
        except CrashError:
            self.flush()
        while self.deliver():
            pass

    def wait(self, seconds: float) -> None:
        """Let time pass, with nothing done out there but deliveries."""
        end = self.now + seconds
        self.flush()
        while (due_at := self.cluster.next_due_at()) is not None and due_at <= end:
            self.now = max(due_at, self.now)
            self.flush()
        self.now = end
        self.flush()

    def converge(self, seconds: float = 300.0) -> None:
        """Let time pass until all is as it should be; fail when it does not come to that."""
        end = self.now + seconds
        while True:
            self.flush()
            self.work()
            self.flush()
            if self.has_converged():
                return
            assert self.now < end, f"not settled: {self.describe()}"
            due_at = self.cluster.next_due_at()
            self.now = min(self.now + 1.0, max(due_at or end, self.now))

    def has_converged(self) -> bool:
        """Return whether goals have ended, and what runs and what is held is what should be."""
        cluster = self.cluster
        return (
            not cluster.state.long_poll.closed
            and not cluster.state.goals.pending()
            and all(b.converged and not b.record.deleting for b in cluster.state.backends.values())
            and all(
                r.state == "RUNNING"
                for b in cluster.state.backends.values()
                for r in b.replicas.values()
            )
            and self.recorded() == set(self.processes)
            and all(proxy.seen == self.proxies[0].seen for proxy in self.proxies)
        )

    def recorded(self) -> set[str]:
        """Return the tags of all replicas in the saved records."""
        return {tag for record in self.records["backend"].values() for tag in record.replicas}

    def running(self, backend: str) -> list[Process]:
        """Return a backend's running processes."""
        return [
            process
            for process in self.processes.values()
            if process.tag.rpartition("#")[0] == backend and process.state == "running"
        ]

    def goal_state(self, goal_id: str) -> str:
        return self.cluster.state.goal(goal_id).state

    def table(self, key: str) -> Any:
        """Return what the first proxy holds."""
        return self.proxies[0].tables.get(key)

    def describe(self) -> str:
        lines = [f"{p.tag} pid {p.pid} {p.state}" for p in self.processes.values()]
        lines += [
            f"record {tag}: {[(r.tag, r.state.value) for r in backend.replicas.values()]} "
            f"wanted {backend.wanted} deleting {backend.record.deleting}"
            for tag, backend in self.cluster.state.backends.items()
        ]
        lines += [f"pending {goal}" for goal in self.cluster.state.goals.pending()]
        return "\n".join(lines)

    def sent(self, kind: type[Any]) -> list[Any]:
        """Return the performed effects of a kind, and forget all."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects.clear()
        return found
