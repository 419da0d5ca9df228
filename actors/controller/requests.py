"""What clients ask of the controller: each request's way to the core, and its answer's way back.

A request that takes effect is answered at the end of the turn, when it is saved. Some answers wait
longer: for a goal, or for every proxy to know of the change.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from greenroom.actors.controller.read_only import not_saved
from greenroom.actors.messages import admin as am
from greenroom.actors.messages.queries import Address
from greenroom.core.cluster import status
from greenroom.core.cluster.changes import Changes
from greenroom.core.cluster.state import Cluster
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.lifecycle import deploying, history
from greenroom.core.lifecycle.history import Author
from greenroom.core.routing.tables import ENDPOINT_PREFIX

logger = logging.getLogger(__name__)

MAX_SETTLED = 1_000  # answers that are kept for repeats
ASKED_S = 60.0  # clients repeat what they wait for: who has not for so long is gone
FAILED = "the controller failed; see controller.log"
HELD_TIMEOUT_S = 5.0  # how long an answer waits for proxies to hold a changed endpoint

Reply = Callable[[], am.RequestReply | None]


class _Parked(NamedTuple):
    """A request whose answer waits for something."""

    sender: Address
    answer: Reply
    give_up_at: float
    while_asked: bool


class Requests:
    """The controller's requests by their class, and the answers that are owed.

    ``own`` adds those that the controller carries out itself, for they are about more than the
    core's state.
    """

    def __init__(self, cluster: Cluster, own: dict[type[am.Request], Callable[[Any], Any]]) -> None:
        self._cluster = cluster
        self._parked: dict[str, _Parked] = {}  # by request id
        self._answers: list[tuple[Address, am.RequestReply]] = []
        self._settled: dict[str, am.RequestReply] = {}  # by request id, the oldest first
        self._taken: dict[str, Address] = {}  # by request id, of those that are not saved yet
        self._requests: dict[type[am.Request], Callable[[Any], Any]] = {
            am.CreateBackend: self._create_backend,
            am.UpdateBackendConfig: self._update_backend_config,
            am.DeleteBackend: self._delete_backend,
            am.GetBackendConfig: lambda r: cluster.backend_config(r.tag),
            am.ListBackends: lambda _: status.backends(cluster),
            am.GetAutoscaling: lambda _: status.autoscaling(cluster, time.monotonic(), time.time()),
            am.ListEndpoints: lambda _: status.endpoints(cluster),
            am.DeployApplication: self._deploy_application,
            am.ListMissing: lambda r: [
                each for each in r.digests if not cluster.code_use.is_stored(each)
            ],
            am.DeleteApplication: lambda r: deploying.delete_application(
                cluster, r.application, time.time()
            ),
            am.PlanApplication: self._plan_application,
            am.DeployDeployment: self._deploy_deployment,
            am.DeleteDeployment: lambda r: deploying.delete_deployment(
                cluster, r.name, time.time()
            ),
            am.DeleteEverything: lambda _: deploying.delete_everything(cluster, time.time()),
            am.GetDeployment: lambda r: status.deployment(cluster, r.name),
            am.ListDeployments: lambda _: status.deployments(cluster),
            am.ListHistory: lambda _: [history.described(entry) for entry in cluster.history],
            am.StartRollout: self._start_rollout,
            am.GetDifferences: lambda r: status.differences(cluster, r.endpoint),
            am.ListRollouts: lambda _: cluster.rollouts.status(time.monotonic()),
            am.UndoChange: lambda r: deploying.undo(cluster, r.change_id, time.time()),
            **own,
        }
        self._held_requests: dict[type[am.Request], Callable[[Any], None]] = {
            am.CreateEndpoint: self._create_endpoint,
            am.DeleteEndpoint: lambda r: cluster.delete_endpoint(r.name),
            am.SetTraffic: lambda r: cluster.set_traffic(r.endpoint, r.weights),
            am.ShadowTraffic: lambda r: cluster.shadow_traffic(
                r.endpoint, r.backend, r.proportion, r.compare
            ),
            am.AbortRollout: lambda r: cluster.rollouts.abort(r.endpoint, time.time()),
            am.PromoteRollout: lambda r: cluster.rollouts.promote(r.endpoint, time.time()),
        }

    def take(self, message: am.Request, sender: Address) -> None:
        """Carry out a request; what it raises is answered, too."""
        settled = self._settled.get(message.request_id)
        if settled is not None:
            self._answers.append((sender, settled))
            return
        self._taken[message.request_id] = sender
        try:
            self._take(message, sender)
        except GreenroomError as error:
            if self._cluster.is_torn:
                raise
            self._answer(sender, failure(message.request_id, error))

    def _take(self, message: am.Request, sender: Address) -> None:
        message.check()
        kind: Any = type(message)
        if isinstance(message, am.WaitForGoal):
            self._cluster.goal(message.goal_id)
            reply = lambda: self._goal_reply(message)  # noqa: E731
            self.park(message, sender, reply, ASKED_S, while_asked=True)
        elif kind in self._held_requests:
            self._change(message, sender, self._held_requests[kind])
            name: str = getattr(message, "name", "") or getattr(message, "endpoint", "")
            self.park(message, sender, lambda: self._held_reply(message, name), HELD_TIMEOUT_S)
        elif kind in self._requests:
            value = self._change(message, sender, self._requests[kind])
            self._answer(sender, am.RequestReply(request_id=message.request_id, value=value))
        else:
            raise InvalidRequestError(f"the controller does not know a request {kind.__name__}")

    def _change(self, message: am.Request, sender: Address, make: Callable[[Any], Any]) -> Any:
        author = Author(message.user, _host_of(sender), message.request_id)
        what = _told(message)
        if isinstance(message, am.UndoChange):
            what = f"undo change {self._cluster.history.get(message.change_id).id}"
        return self._cluster.change(author, what, lambda: make(message), time.time())

    def park(
        self,
        message: am.Request,
        sender: Address,
        answer: Reply,
        timeout_s: float = float("inf"),
        *,
        while_asked: bool = False,
    ) -> None:
        """Answer when ``answer`` has a reply; a repeat of the request replaces the first.

        The time limit stays that of the first: clients repeat more often than that. With
        ``while_asked`` each repeat begins it anew, and past it the request is forgotten.
        """
        give_up_at = time.monotonic() + timeout_s
        earlier = self._parked.pop(message.request_id, None)
        if earlier is not None and not while_asked:
            give_up_at = min(give_up_at, earlier.give_up_at)
        self._parked[message.request_id] = _Parked(sender, answer, give_up_at, while_asked)

    def take_answers(self) -> list[tuple[Address, am.RequestReply]]:
        """Return what is to be answered now; everything that it tells of must be saved."""
        now = time.monotonic()
        for request_id, parked in list(self._parked.items()):
            reply = self._reply_to(request_id, parked)
            is_over = now > parked.give_up_at
            if reply is None and is_over and not parked.while_asked:
                text = "saved, but not every proxy has taken it yet; it will when it answers again"
                reply = am.RequestReply(
                    request_id=request_id, error_kind="GreenroomError", error=text
                )
            if reply is not None:
                self._answer(parked.sender, reply)
            if reply is not None or is_over:
                del self._parked[request_id]
        answers, self._answers = self._answers, []
        return answers

    @staticmethod
    def _reply_to(request_id: str, parked: _Parked) -> am.RequestReply | None:
        """Return the answer, where it is time; one that fails must not end the controller.

        Its client would only ask the next one, and that would end as well.
        """
        try:
            return parked.answer()
        except Exception as error:
            logger.exception("the answer to a request that waits failed")
            text = f"{type(error).__name__}: {error}"
            return am.RequestReply(request_id=request_id, error_kind="GreenroomError", error=text)

    def saved(self) -> None:
        """Take note that what was taken is on disk, or changes nothing there."""
        self._taken.clear()

    def lost(self, error: Exception) -> list[tuple[Address, am.RequestReply]]:
        """Return what to answer those whose requests were taken in a turn that failed."""
        return [(sender, failure(taken, error)) for taken, sender in self._taken.items()]

    def not_saved(
        self, changes: Changes, error: Exception
    ) -> list[tuple[Address, am.RequestReply]]:
        """Return what to answer those whose changes these are, which could not be saved."""
        entries: Iterable[Any] = [r for (kind, _), r in changes.puts.items() if kind == "history"]
        return [
            (self._taken[entry.request_id], not_saved(entry.request_id, error))
            for entry in entries
            if entry.request_id in self._taken
        ]

    def _answer(self, sender: Address, reply: am.RequestReply) -> None:
        """Owe an answer, and give it to repeats too.

        The client may have repeated its request before it got the answer, and go on by that. What
        was refused, or changed nothing, has no entry in the history, and might change something by
        the time at which the repeat is here.
        """
        self._answers.append((sender, reply))
        if reply.value is None or isinstance(reply.value, str | bool):  # else it was only read
            self._settled[reply.request_id] = reply
            if len(self._settled) > MAX_SETTLED:
                del self._settled[next(iter(self._settled))]

    def due_at(self) -> float:
        """Return when :meth:`take_answers` has to look again, if nothing happens before."""
        return min((each.give_up_at for each in self._parked.values()), default=float("inf"))

    # --- Answers that wait ----------------------------------------------------------------------

    def _goal_reply(self, message: am.WaitForGoal) -> am.RequestReply | None:
        goal = self._cluster.goals.get(message.goal_id)
        if goal is None:
            return am.RequestReply(
                request_id=message.request_id,
                error_kind="UnknownNameError",
                error=f"goal {message.goal_id!r} has ended, too many others ago to tell how",
            )
        if goal.state == "pending":
            return None
        if goal.state == "succeeded":
            return am.RequestReply(request_id=message.request_id, value=True)
        return am.RequestReply(
            request_id=message.request_id,
            error_kind="DeployFailedError",
            error=goal.error,
            exception=goal.exception,
        )

    def _held_reply(self, message: am.Request, endpoint: str) -> am.RequestReply | None:
        if not self._cluster.long_poll.held_by_all(ENDPOINT_PREFIX + endpoint):
            return None
        return am.RequestReply(request_id=message.request_id)

    # --- Changes --------------------------------------------------------------------------------

    def _create_backend(self, r: am.CreateBackend) -> str | None:
        folders = deploying.by_digest(r.folders)
        folder = r.actor_options.get("working_dir")
        if folder is not None and folder not in folders:
            deploying.check_folders(self._cluster, r.tag, [folder])
        return self._cluster.create_backend(
            r.tag,
            folders=folders,
            code=r.code,
            code_hash=r.code_hash,
            config=r.config,
            actor_options=r.actor_options,
            version=r.version,
            wall_now=time.time(),
        )

    def _update_backend_config(self, r: am.UpdateBackendConfig) -> str | None:
        return self._cluster.update_backend_config(r.tag, r.changes, time.time())

    def _delete_backend(self, r: am.DeleteBackend) -> str | None:
        return self._cluster.delete_backend(r.tag, force=r.force, wall_now=time.time())

    def _create_endpoint(self, r: am.CreateEndpoint) -> None:
        self._cluster.create_endpoint(
            r.name,
            backend=r.backend,
            route=r.route,
            methods=tuple(r.methods),
            retryable=r.retryable,
        )

    def _start_rollout(self, r: am.StartRollout) -> str | None:
        return self._cluster.rollouts.start(
            r.endpoint,
            to=r.to,
            steps=r.steps,
            hold_s=r.hold_s,
            abort_if=r.abort_if,
            alpha=r.alpha,
            min_samples=r.min_samples,
            ready_timeout_s=r.ready_timeout_s,
            wall_now=time.time(),
        )

    def _deploy_application(self, r: am.DeployApplication) -> str | None:
        return deploying.deploy_application(
            self._cluster,
            r.application,
            ingress=r.ingress,
            route_prefix=r.route_prefix,
            specs=r.deployments,
            folders=r.folders,
            wall_now=time.time(),
        )

    def _plan_application(self, r: am.PlanApplication) -> list[dict[str, Any]]:
        return deploying.plan_application(
            self._cluster,
            r.application,
            ingress=r.ingress,
            route_prefix=r.route_prefix,
            specs=r.deployments,
        )

    def _deploy_deployment(self, r: am.DeployDeployment) -> str | None:
        return deploying.deploy(
            self._cluster,
            r.spec,
            route_prefix=r.route_prefix,
            prev_version=r.prev_version,
            folders=r.folders,
            wall_now=time.time(),
        )


def _told(message: am.Request) -> str:
    """Return what a request does, for the history: its class's words and the name it has."""
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", type(message).__name__).lower()
    if isinstance(message, am.DeployDeployment):
        return f"deploy {message.spec.name!r}"
    names = (getattr(message, field, "") for field in ("application", "tag", "endpoint", "name"))
    return " ".join([words, *(repr(name) for name in names if name)][:2])


def _host_of(sender: Address) -> str:
    details = sender.addressDetails
    host = getattr(details, "host", None) or details.sockname[0]
    return host or "127.0.0.1"


def failure(request_id: str, error: Exception) -> am.RequestReply:
    """Return the answer to a request that raised."""
    kind = type(error).__name__ if isinstance(error, GreenroomError) else "GreenroomError"
    text = str(error) if kind != "GreenroomError" else f"{FAILED}: {type(error).__name__}: {error}"
    return am.RequestReply(request_id=request_id, error_kind=kind, error=text)
