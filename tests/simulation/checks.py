"""What must hold: after every step, at every answer, and when all has come to rest."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.clients import SHARED
from tests.simulation.expected import Owned
from tests.simulation.rest import tag_of, unsettled
from tests.simulation.world import InvariantError, SimProcess
from understudy.actors import admin_messages as am
from understudy.actors import messages as m
from understudy.core.repeats import may_repeat
from understudy.core.tables import EndpointTable
from understudy.persistence.errors import StoreError

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

VERSION_BYTES = 4  # before the pickle of a record
HELD = (am.CreateEndpoint, am.DeleteEndpoint, am.SetTraffic, am.ShadowTraffic)
REFUSALS = {"ConflictError", "UnknownNameError", "InvalidRequestError"}


class Checks:
    """Takes note of what happens, and raises InvariantError for what must not."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.on_disk: dict[tuple[str, str], Any] = {}  # (kind, name) -> record
        self._owned: dict[int, Owned] = {}
        self._asked: dict[int, am.Request] = {}
        self._based_on: Counter[str] = Counter()  # versions of the shared deployment
        self._rolled_back = False
        self._recorded: set[str] = set()  # proxies that were on disk at some time
        self._deletes: dict[str, str] = {}  # goal -> tag
        self._queries: dict[str, tuple[m.Query, SimProcess]] = {}
        self._answers: Counter[str] = Counter()
        self._runs: Counter[tuple[str, str]] = Counter()  # by query and shadow, "" for none
        self._cancelled: set[str] = set()
        self.counts: Counter[str] = Counter()  # for reports

    # --- Failing ----------------------------------------------------------------------------------

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.failed(InvariantError(text))

    def failed(self, error: BaseException | None, cause: BaseException | None = None) -> None:
        """End the run; shells catch exceptions, so it is kept for who runs the world, too."""
        self._simulation.world.at(0.0, lambda: self._raise(error, cause))
        self._raise(error, cause)

    def _raise(self, error: BaseException | None, cause: BaseException | None) -> None:
        raise error or InvariantError("an error was logged") from cause

    def is_expected(self, error: BaseException) -> bool:
        """Tell whether a shell may have caught this, because the disk was made to fail."""
        return isinstance(error, StoreError)

    # --- Changes ----------------------------------------------------------------------------------

    def saved(self, puts: Mapping[str, bytes], deletes: list[str]) -> None:
        """Look at what a controller has put on the disk."""
        changed = []
        for key, value in puts.items():
            kind, _, name = key.partition("/")
            if kind != "code":
                self.on_disk[kind, name] = pickle.loads(value[VERSION_BYTES:])
                changed.append((kind, name))
        for key in deletes:
            kind, _, name = key.partition("/")
            self.on_disk.pop((kind, name), None)
            changed.append((kind, name))
        for kind, name in changed:
            if kind in {"backend", "endpoint"}:
                self._compare(kind, name)
            elif kind == "listener":
                self._recorded.add(name)

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
        """Return what a client has by what it was told."""
        return self._owned.setdefault(client, Owned())

    def asked(self, client: int, request: am.Request) -> None:
        """A client is about to ask for this."""
        self.owned(client)
        self._asked[client] = request

    def told(self, client: int, request: am.Request, reply: am.RequestReply) -> None:
        """A client has its answer: what that says is on disk."""
        del self._asked[client]
        self.counts[f"{type(request).__name__} {reply.error_kind or 'done'}"] += 1
        if isinstance(request, am.WaitForGoal):
            self._goal_ended(request, reply)
            return
        if isinstance(request, am.GetDeployment):
            return
        if isinstance(request, am.DeployDeployment) and request.spec.name == SHARED:
            self._share_told(request, reply)
            return
        refused = reply.error_kind in REFUSALS
        after = self._owned[client].after(request)
        if refused and after is not None and "being deleted" in reply.error:
            after = None
        self.expect(refused == (after is None), f"{request} was answered {reply}, in {after}")
        if after is not None:
            self._owned[client] = after
        for kind, names in _names(request):
            self._compare(kind, names)
        if isinstance(request, am.DeleteBackend) and reply.value:
            self._deletes[reply.value] = request.tag
        if isinstance(request, HELD) and not reply.error_kind:
            self._is_held(request)

    def _share_told(self, request: am.DeployDeployment, reply: am.RequestReply) -> None:
        record = self.on_disk.get(("backend", SHARED))
        if reply.error_kind:
            self.expect(reply.error_kind == "ConflictError", f"shared: {reply}")
            done = record is not None and record.version == request.spec.version
            self.expect(not done, f"{request} was refused, and carried out")
            return
        self.expect(record is not None, "the shared deployment was acknowledged and is not saved")
        if request.prev_version is not None:
            self._based_on[request.prev_version] += 1
            lost = self._based_on[request.prev_version] > 1 and not self._rolled_back
            self.expect(not lost, f"two deploys were made on top of {request.prev_version}")

    def _goal_ended(self, request: am.WaitForGoal, reply: am.RequestReply) -> None:
        kinds = {"", "DeployFailedError", "UnknownNameError"}
        self.expect(reply.error_kind in kinds, f"a goal ended with {reply}")
        tag = self._deletes.get(request.goal_id)
        if tag is None or reply.error_kind or ("backend", tag) in self.on_disk:
            return
        left = [p for p in self._simulation.replicas() if tag_of(p).rpartition("#")[0] == tag]
        left = [p for p in left if not p.was_stopped]
        self.expect(not left, f"backend {tag} is deleted, and {left} live")

    def _is_held(self, request: am.Request) -> None:
        name: str = getattr(request, "name", "") or getattr(request, "endpoint", "")
        record = self.on_disk.get(("endpoint", name))
        for process in self._simulation.proxies():
            router = self._simulation.routers.get(process.pid)
            if router is None or not process.actor._ready:
                continue
            table: EndpointTable | None = router.endpoints.get(name)
            wanted = record and (dict(record.traffic), dict(record.shadows))
            found = table and (dict(table.traffic), dict(table.shadows))
            told = f"{request} was answered, and {process} holds {found} instead of {wanted}"
            self.expect(found == wanted, told)

    def is_told(self, proxy: SimProcess) -> None:
        """A proxy takes a table: a next controller has to know of it."""
        known = proxy.identity.incarnation in self._recorded
        self.expect(known, f"{proxy} was told of a table before it was on record")

    def endpoint_names(self) -> list[str]:
        """Return what callers may ask for."""
        there = [name for owned in self._owned.values() for name in owned.endpoints]
        return [*there, *there, *there, SHARED, f"c{len(self._owned) - 1}e", "none"]

    # --- Queries ----------------------------------------------------------------------------------

    def submitted(self, uid: str, query: m.Query, caller: SimProcess) -> None:
        self._queries[uid] = (query, caller)

    def cancelled(self, uid: str) -> None:
        self._cancelled.add(uid)

    def began(self, code: Any, assignment: m.Assignment, running: int) -> None:
        """User code begins to run a query."""
        replica = code.process.actor
        uid = assignment.query.call.decode()
        backend = replica._tag.rpartition("#")[0] if assignment.caller is None else ""
        self._runs[uid, backend] += 1
        self.expect(
            may_repeat(assignment.query, None, None) or self._runs[uid, backend] == 1,
            f"query {uid} may not be repeated, and runs again at {replica._tag} as a {backend!r}",
        )
        limit = replica._config["max_ongoing_requests"]
        self.expect(running <= limit, f"{replica._tag} runs {running} queries, above {limit}")
        self.expect(
            replica._state == "running", f"{replica._tag} is {replica._state}, and runs one"
        )

    def answered(self, uid: str, answer: m.Answer) -> None:
        """A caller's user has an answer."""
        query, _ = self._queries[uid]
        self._answers[uid] += 1
        self.expect(self._answers[uid] == 1, f"query {uid} is answered again: {answer}")
        self.expect(uid not in self._cancelled, f"query {uid} is answered after it was cancelled")
        kind = getattr(answer, "kind", "done")
        self.counts[f"query {kind}"] += 1
        if kind in {"done", "UserCodeError"}:
            said = answer.value if isinstance(answer, m.ValueAnswer) else answer.text.encode()
            self.expect(said == query.call, f"query {uid} has the answer of {said!r}")
            self.expect(self._runs[uid, ""] > 0, f"query {uid} is answered, and never ran")
        elif kind == "ReplicaUnavailableError":
            text = getattr(answer, "text", "")
            repeatable = may_repeat(query, None, None)
            enough = "3 replicas died" in text or "as many as" in text
            may = enough if repeatable else not self._simulation.faults.calm
            may = may or "the replica died" in text  # by its own code, in calm times
            self.expect(may, f"query {uid}, repeatable: {repeatable}, failed: {text}")

    # --- At rest ----------------------------------------------------------------------------------

    def unsettled(self) -> str:
        """Return what has yet to come to rest, "" for nothing."""
        return unsettled(self._simulation)

    def at_the_end(self) -> None:
        """Look at all that was said and done."""
        for client in self._simulation.clients:
            owned = self._owned[client.number]
            for kind, names in (
                ("backend", [*client.backends, client.deployment]),
                ("endpoint", [client.endpoint, client.deployment]),
            ):
                for name in names:
                    record = self.on_disk.get((kind, name))
                    self.expect(owned.fits(kind, name, record), f"{name} is {record}, not {owned}")
        for uid, (_, caller) in self._queries.items():
            if caller.alive and uid not in self._cancelled:
                self.expect(self._answers[uid] == 1, f"query {uid} has no answer")


def _names(request: Any) -> list[tuple[str, str]]:
    if isinstance(request, (am.CreateBackend, am.UpdateBackendConfig, am.DeleteBackend)):
        return [("backend", request.tag)]
    if isinstance(request, (am.DeployDeployment, am.DeleteDeployment)):
        name = request.spec.name if isinstance(request, am.DeployDeployment) else request.name
        return [("backend", name), ("endpoint", name)]
    if isinstance(request, (am.SetTraffic, am.ShadowTraffic)):
        return [("endpoint", request.endpoint)]
    return [("endpoint", request.name)]
