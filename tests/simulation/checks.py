"""What must hold: after every step, at every answer, and when all has come to rest."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from greenroom.actors.messages import admin as am
from greenroom.actors.runtime.settings import DEFAULT_SILENCE_TIMEOUT_S
from greenroom.core import operations as ops
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.routing.tables import EndpointTable
from greenroom.core.silence import TICK_S
from greenroom.persistence.kv import StoreError
from tests.simulation.applications import FRONT, ApplicationChecks, Deployer, is_of_application
from tests.simulation.clients import SHARED
from tests.simulation.expected import Owned
from tests.simulation.history_checks import HistoryChecks
from tests.simulation.leader_checks import LeaderChecks
from tests.simulation.query_checks import QueryChecks
from tests.simulation.rest import tag_of, unsettled
from tests.simulation.rollout_checks import RolloutChecks, served
from tests.simulation.world import InjectedError, InvariantError, SimProcess

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

VERSION_BYTES = 4  # before the pickle of a record
MOST_MADE = 5  # processes of a replica that dies at once; there are several controllers
BACK_S = 20.0  # within which a host that had trouble is back
RESUMES_S = 0.1  # within which a process that was stopped takes its next turn
HELD = (
    ops.CreateEndpoint,
    ops.DeleteEndpoint,
    ops.SetTraffic,
    ops.ShadowTraffic,
    ops.AbortRollout,
    ops.PromoteRollout,
)
READS = (ops.GetDeployment, ops.GetDifferences, ops.ListHistory)
REFUSALS = {"ConflictError", "UnknownNameError", "InvalidRequestError"}


class Checks:
    """Takes note of what happens, and raises InvariantError for what must not."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.on_disk: dict[tuple[str, str], Any] = {}  # (kind, name) -> record
        self._owned: dict[int, Owned] = {}
        self._asked: dict[int, ops.Operation] = {}
        self._asked_with: dict[int, str] = {}  # the ids of their requests
        self._based_on: Counter[str] = Counter()  # versions of the shared deployment
        self._rolled_back = False
        self._before_step: dict[str, Any] = {}  # endpoint -> its record before the rollout's step
        self.recorded: set[str] = set()  # proxies that were on disk at some time
        self._deletes: dict[str, str] = {}  # goal -> tag
        self._blocked: dict[int, bool] = {}  # by a rollout, when it was asked
        self._kinds: dict[str, bytes] = {}  # of code, by its digest
        self.counts: Counter[str] = Counter()  # for reports
        self.queries = QueryChecks(self)
        self.rollouts = RolloutChecks(self)
        self.history = HistoryChecks(self)
        self.leaders = LeaderChecks(self)
        self.applications = ApplicationChecks(self)
        simulation.world.on_order = self.leaders.handles

    # --- Failing ----------------------------------------------------------------------------------

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.failed(InvariantError(text))

    def failed(self, error: BaseException | None, cause: BaseException | None = None) -> None:
        """End the run; shells catch exceptions, so it is kept for who runs the world, too."""
        self.simulation.world.at(0.0, lambda: self._raise(error, cause))
        self._raise(error, cause)

    def _raise(self, error: BaseException | None, cause: BaseException | None) -> None:
        raise error or InvariantError("an error was logged") from cause

    def is_expected(self, error: BaseException) -> bool:
        """Return whether a shell may have caught this, because it was made to fail."""
        made = (StoreError, InjectedError)
        return isinstance(error, made) or isinstance(error.__cause__, made)

    # --- Changes ----------------------------------------------------------------------------------

    def saved(self, puts: Mapping[str, bytes], deletes: list[str]) -> None:
        """Look at what a controller has put on the disk."""
        records = {k: pickle.loads(v[VERSION_BYTES:]) for k, v in puts.items() if k[:5] != "code/"}
        changed = {_split(key): record for key, record in records.items()}
        changed |= dict.fromkeys(map(_split, deletes))
        before = {key: self.on_disk.get(key) for key in changed}
        for key, record in changed.items():
            self.on_disk[key] = record
            if record is None:
                del self.on_disk[key]
        self.recorded |= {name for kind, name in changed if kind == "listener"}
        self.applications.saved(before)
        changed = {key: each for key, each in changed.items() if not is_of_application(key[1])}
        for name in sorted({name for kind, name in changed if kind in {"endpoint", "rollout"}}):
            self._follow_rollout(name, before)
        entries = [
            each for (kind, _), each in sorted(changed.items()) if kind == "history" and each
        ]
        things = {key: before[key] for key in changed if key[0] in {"backend", "endpoint"}}
        self.history.saved(entries, things)
        for entry in entries:
            self._follow_undo(entry)
        for kind, name in things:
            self._compare(kind, name)

    def _follow_rollout(self, name: str, before: dict[tuple[str, str], Any]) -> None:
        old = [
            before[kind, name] if (kind, name) in before else self.on_disk.get((kind, name))
            for kind in ("rollout", "endpoint")
        ]
        self._before_step.pop(name, None)
        if self.rollouts.saved(name, *old):
            self._adopt("endpoint", name, self.on_disk["endpoint", name])
            self._before_step[name] = served(old[1], old[0])

    def _follow_undo(self, entry: Any) -> None:
        for client, request in self._asked.items():
            is_it = self._asked_with[client] == entry.request_id
            if is_it and isinstance(request, ops.UndoChange):
                self.history.undone(request, entry)
                for (kind, name), definition in entry.after.items():
                    self._adopt(kind, name, definition)

    def _adopt(self, kind: str, name: str, definition: Any) -> None:
        """Take over what the cluster has made of a client's thing, as it was allowed to."""
        owner = int(name[1])
        self._owned[owner] = self._owned[owner].adopting(kind, name, definition)

    def _compare(self, kind: str, name: str) -> None:
        record = self.on_disk.get((kind, name))
        if name == SHARED:
            self._rolled_back |= kind == "backend" and bool(record.update_failure)
            return
        owner = int(name[1])
        owned, asked = self._owned[owner], self._asked.get(owner)
        possible = [owned, owned.after(asked) or owned] if asked is not None else [owned]
        self.expect(
            any(each.fits(kind, name, record) for each in possible),
            f"{kind} {name} is saved as {record}, and should be as in {possible}",
        )

    def owned(self, client: int) -> Owned:
        """Return what a client has by what it was answered."""
        return self._owned.setdefault(client, Owned())

    def asked(self, client: int, request_id: str, request: ops.Operation) -> None:
        """A client is about to ask for this."""
        self.owned(client)
        self._asked_with[client] = request_id
        self._asked[client] = request
        self._blocked[client] = self._is_blocked(client, request)
        if isinstance(request, ops.DeployApplications):
            self.applications.asked(request)
        code = getattr(request, "code", None) or getattr(
            getattr(request, "spec", None), "code", None
        )
        if code is not None:
            self._kinds[hashlib.sha256(code).hexdigest()] = code.split()[0]

    def _is_blocked(self, client: int, request: ops.Operation) -> bool:
        return self.rollouts.blocks(request, self.on_disk.get(("rollout", f"c{client}e")))

    def pending(self, name: str) -> ops.Operation | None:
        """Return what the owner of a thing asks for at present."""
        return self._asked.get(int(name[1]))

    def kind_of(self, backend: str) -> bytes:
        """Return what kind of code a backend has."""
        record = self.on_disk.get(("backend", backend))
        return self._kinds.get(record.newest.code_digest, b"") if record is not None else b""

    def not_saved(self, request: ops.Operation, reply: am.RequestReply) -> None:
        """A client hears that the state cannot be saved: what was not made is not on disk."""
        certain = "Nothing was changed" in reply.error
        self.counts[f"not saved, {'certainly' if certain else 'perhaps'}"] += 1
        if certain:
            self.history.is_not_made(request, reply.request_id)

    def answered(self, client: int, request: ops.Operation, reply: am.RequestReply) -> None:
        """A client has its answer: what that says is on disk."""
        del self._asked[client]
        self.counts[f"{request.key} {reply.error_kind or 'done'}"] += 1
        if isinstance(request, ops.WaitForGoal):
            self._goal_ended(request, reply)
            if isinstance(self.simulation.clients[client], Deployer):
                self.applications.goal_ended(reply)
        elif isinstance(self.simulation.clients[client], Deployer):
            self.applications.answered(request, reply)
        elif isinstance(request, ops.Deploy) and request.spec.name == SHARED:
            self._check_share(request, reply)
            self.history.answered(request, reply, changed=True)
        elif isinstance(request, ops.UndoChange):
            self.history.answered(request, reply, changed=True)
        elif isinstance(request, ops.AbortRollout | ops.PromoteRollout):
            self.rollouts.answered(request, reply)
            self._is_acknowledged(request, reply)
        elif not isinstance(request, READS):
            self._check_change(client, request, reply)

    def _check_change(self, client: int, request: ops.Operation, reply: am.RequestReply) -> None:
        refused = reply.error_kind in REFUSALS
        owned = self._owned[client]
        after = owned.after(request)
        if refused and after is not None and "being deleted" in reply.error:
            after = None
        if self._blocked[client] or self._is_blocked(client, request):
            after = self._where_blocked(client, request, after, refused=refused)
        self.expect(refused == (after is None), f"{request} was answered {reply}, in {after}")
        changed = after is not None and after.differs(owned)
        self.history.answered(request, reply, changed=changed)
        if after is not None:
            self._owned[client] = after
        for kind, names in _names(request):
            self._compare(kind, names)
        if isinstance(request, ops.DeleteBackend) and reply.value:
            self._deletes[reply.value] = request.tag
        self._is_acknowledged(request, reply)

    def _where_blocked(
        self, client: int, request: ops.Operation, after: Owned | None, *, refused: bool
    ) -> Owned | None:
        """Return what a request leads to that a rollout forbade, when it was asked or is now."""
        if refused:
            self.expect(self._blocked[client] or after is None, f"{request} was refused too early")
            return None
        record = self.on_disk.get(("rollout", f"c{client}e"))
        if isinstance(request, ops.SetTraffic) and record is not None:
            held = dict(self.on_disk["endpoint", request.endpoint].traffic)
            if request.weights == {record.to: 0.0, **record.before}:  # no change, at the beginning
                return after if held == request.weights else self._owned[client]
        self.expect(not self._is_blocked(client, request), f"{request} was done amid {record}")
        return after

    def _is_acknowledged(self, request: ops.Operation, reply: am.RequestReply) -> None:
        if isinstance(request, HELD) and not reply.error_kind:
            self._is_held(request)

    def _check_share(self, request: ops.Deploy, reply: am.RequestReply) -> None:
        record = self.on_disk.get(("backend", SHARED))
        if reply.error_kind:
            self.expect(reply.error_kind == "ConflictError", f"shared: {reply}")
            done = record is not None and record.newest.version == request.spec.version
            self.expect(not done, f"{request} was refused, and carried out")
            return
        self.expect(record is not None, "the shared deployment was acknowledged and is not saved")
        if request.prev_version is not None:
            self._based_on[request.prev_version] += 1
            lost = self._based_on[request.prev_version] > 1 and not self._rolled_back
            self.expect(not lost, f"two deploys were made on top of {request.prev_version}")

    def _goal_ended(self, request: ops.WaitForGoal, reply: am.RequestReply) -> None:
        kinds = {"", "DeployFailedError", "UnknownNameError"}
        self.expect(reply.error_kind in kinds, f"a goal ended with {reply}")
        tag = self._deletes.get(request.goal_id)
        if tag is None or reply.error_kind or ("backend", tag) in self.on_disk:
            return
        left = [p for p in self.simulation.replicas() if tag_of(p).rpartition("#")[0] == tag]
        left = [p for p in left if not (p.was_stopped or self.is_lost(p))]
        self.expect(not left, f"backend {tag} is deleted, and {left} live")

    def _is_held(self, request: ops.Operation) -> None:
        name: str = getattr(request, "name", "") or getattr(request, "endpoint", "")
        record = served(self.on_disk.get(("endpoint", name)), self.on_disk.get(("rollout", name)))
        self._no_lease_is_against(name, record)
        for process in self.simulation.proxies():
            router = self.simulation.routers.get(process.pid)
            if router is None or not process.actor.dispatcher.ready:
                continue
            if self.is_lost(process):
                continue
            table: EndpointTable | None = router.endpoints.get(name)
            wanted = record and (dict(record.traffic), dict(record.shadows))
            found = table and (dict(table.traffic), dict(table.shadows))
            message = f"{request} was answered, and {process} holds {found} instead of {wanted}"
            # A rollout may have gone a step with the answer on its way, and waits for nobody.
            before = self._before_step.get(name)
            earlier = before and (dict(before.traffic), dict(before.shadows))
            self.expect(found in (wanted, earlier or wanted), message)

    def _no_lease_is_against(self, name: str, record: Any) -> None:
        """Expect that nothing can begin where an endpoint's acknowledged record has no traffic."""
        wanted = {tag for tag, weight in record.traffic.items() if weight > 0} if record else set()
        before = self._before_step.get(name)
        wanted |= set(before.traffic) if before else set()
        replicas = {tag_of(each): each for each in self.simulation.replicas()}
        for sim in self.simulation.callers:
            if sim is None or self.is_lost(sim.process):
                continue
            held = [each for each in sim.caller.leases.held.values() if each.endpoint == name]
            for share in [share for each in held for share in each.shares]:
                lease = share.lease
                replica = replicas.get(share.replica)
                if replica is None or replica.actor.queries is None:
                    continue
                is_open = lease.name in replica.actor.queries.leases
                is_wanted = share.replica.rpartition("#")[0] in wanted
                message = f"{sim.process} may still send to {share.replica}, by {lease.name}"
                self.expect(is_wanted or not is_open, f"{message}; {name} is {record}")
                self.counts["lease seen at an acknowledgement"] += 1

    def silenced(self, pid: int) -> None:
        """A process is killed for its silence: it stands still, and has been silent long enough.

        It may have waited for a slow disk before it was stopped, and goes on later than it might
        where another process stands in the midst of a turn: see World.stand_still.
        """
        process, now = self.simulation.world.processes[pid], self.simulation.world.clock()
        since, until = process.stopped
        message = f"{process} is killed for its silence, and was stopped {since} to {until}"
        is_long = process.pulse.beat_at + DEFAULT_SILENCE_TIMEOUT_S - TICK_S <= now
        was_stopped = now < until + RESUMES_S or process.stands
        self.expect(is_long and since <= now and was_stopped, message)
        self.counts["killed for silence"] += 1

    def is_lost(self, process: SimProcess) -> bool:
        """Return whether a process's host may count as lost; then nothing waits for it."""
        return self.simulation.faults.of_hosts.is_troubled(process.host, BACK_S)

    def takes_table(self, proxy: SimProcess) -> None:
        """A proxy takes a table: a next controller has to know of it."""
        known = proxy.identity.incarnation in self.recorded
        self.expect(known, f"{proxy} was told of a table before it was on record")

    def endpoint_names(self) -> list[str]:
        """Return what callers may ask for."""
        there = [name for owned in self._owned.values() for name in owned.endpoints]
        if ("endpoint", FRONT) in self.on_disk:
            there += [FRONT] * 2
        return [*there, *there, *there, SHARED, f"c{len(self._owned) - 1}e", "none"]

    # --- At rest ----------------------------------------------------------------------------------

    def unsettled(self) -> str:
        """Return what has yet to come to rest, "" for nothing."""
        return unsettled(self.simulation)

    def at_the_end(self) -> None:
        """Look at all that was said and done."""
        for client in self.simulation.clients:
            owned = self._owned[client.number]
            for kind, names in (
                ("backend", [*client.backends, client.deployment]),
                ("endpoint", [client.endpoint, client.deployment]),
            ):
                for name in names:
                    record = self.on_disk.get((kind, name))
                    self.expect(owned.fits(kind, name, record), f"{name} is {record}, not {owned}")
        most = max(self.simulation.made.values(), default=0)
        self.expect(most <= MOST_MADE, f"a replica was made {most} times, dying each time at once")
        self.queries.at_the_end()
        self.leaders.at_the_end(self.simulation.disk, KINDS)


def _split(key: str) -> tuple[str, str]:
    kind, _, name = key.partition("/")
    return kind, name


def _names(request: Any) -> list[tuple[str, str]]:
    if isinstance(request, (ops.CreateBackend, ops.UpdateBackendConfig, ops.DeleteBackend)):
        return [("backend", request.tag)]
    if isinstance(request, (ops.Deploy, ops.DeleteDeployment)):
        name = request.spec.name if isinstance(request, ops.Deploy) else request.name
        return [("backend", name), ("endpoint", name)]
    if isinstance(request, (ops.SetTraffic, ops.ShadowTraffic, ops.StartRollout)):
        return [("endpoint", request.endpoint)]
    return [("endpoint", request.name)]
