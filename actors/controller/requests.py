"""Requests of clients: passes each operation to the core, and its answer back to the client.

Theory of operation. A request that changes something is answered at the end of the turn, when it is
saved. Some answers wait longer: for a goal, for every proxy to know of the change, for a host to be
empty. Those are parked. They are tried again when what they wait for has changed, or in each turn
where that shows nowhere. Clients repeat a request until it is answered; a
repeat finds its answer here, or in the history, and changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from greenroom.actors.messages.admin import Request, RequestReply
from greenroom.actors.messages.queries import Address
from greenroom.core import operations as ops
from greenroom.core.agenda import HELD
from greenroom.core.cluster.admin import ASKED_S, PENDING, TURN, Later, Now, carry_out
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.errors import DeployFailedError, GreenroomError, StateNotSavedError
from greenroom.core.lifecycle.goals import GOAL
from greenroom.core.lifecycle.history import Author
from greenroom.core.records import Changes
from greenroom.core.routing.tables import ENDPOINT_PREFIX

logger = logging.getLogger(__name__)

MAX_ANSWERED = 1_000  # answers that are kept for repeats
HELD_TIMEOUT_S = 5.0  # how long an answer waits for proxies to hold a changed endpoint
FAILED = "the controller failed; see controller.log"
REQUEST = "request"  # the kind of their keys on the agenda


class _Parked(NamedTuple):
    sender: Address
    answer: Later
    abandon_at: float


class Requests:
    """Carries out requests, and keeps the answers that are owed.

    ``own`` are the operations that the controller carries out itself, because they are about more
    than the core's state. Each is given the operation and the request's id, and returns the answer
    or a Later.
    """

    def __init__(
        self, cluster: Cluster, own: Mapping[type[ops.Operation], Callable[[Any, str], Any]]
    ) -> None:
        self._cluster = cluster
        self._own: dict[type[ops.Operation], Callable[[Any, str], Any]]
        self._own = {ops.WaitForGoal: self._wait_for_goal, **own}
        self._parked: dict[str, _Parked] = {}  # by request id
        self._agenda = cluster.state.agenda
        self._answers: list[tuple[Address, RequestReply]] = []
        self._answered: dict[str, RequestReply] = {}  # by request id, the oldest first
        self._taken: dict[str, Address] = {}  # by request id, of those that are not saved yet

    def take(self, request: Request, sender: Address) -> None:
        """Carry out a request; what it raises is answered, too."""
        answered = self._answered.get(request.request_id)
        if answered is not None:
            self._answers.append((sender, answered))
            return
        if request.request_id in self._parked:  # what it asks for may have been taken back
            self._park(request.request_id, sender, self._parked[request.request_id].answer)
            return
        self._taken[request.request_id] = sender
        try:
            operation = ops.read_operation(request.operation, request.fields)
            answer = self._carry_out(operation, request, sender)
        except GreenroomError as error:
            if self._cluster.state.is_torn:
                raise
            self._answer(sender, failure(request.request_id, error))
            return
        if isinstance(answer, Later):
            self._park(request.request_id, sender, answer)
        else:
            reply = RequestReply(request_id=request.request_id, value=answer)
            self._answer(sender, reply, keep=not operation.is_read)

    def _carry_out(self, operation: ops.Operation, request: Request, sender: Address) -> Any:
        own = self._own.get(type(operation))
        if own is not None:
            return own(operation, request.request_id)
        author = Author(request.user, _host_of(sender), request.request_id)
        answer = carry_out(self._cluster, operation, author, Now(time.monotonic(), time.time()))
        if not operation.is_held_by_proxies:
            return answer
        key = ENDPOINT_PREFIX + next(iter(operation.fields.values()))
        held = self._cluster.state.long_poll.held_by_all
        return Later(lambda: answer if held(key) else PENDING, HELD_TIMEOUT_S, upon=HELD)

    def _wait_for_goal(self, operation: ops.WaitForGoal, _request_id: str) -> Later:
        state = self._cluster.state

        def poll() -> Any:
            goal = state.goal(operation.goal_id)
            if goal.state == "failed":
                error = DeployFailedError(goal.error)
                error.exception = goal.exception
                raise error
            return True if goal.state == "succeeded" else PENDING

        state.goal(operation.goal_id)
        return Later(poll, ASKED_S, while_asked=True, upon=(GOAL, operation.goal_id))

    def _park(self, request_id: str, sender: Address, answer: Later) -> None:
        """Answer later; a repeat of the request takes the place of the first.

        The time limit stays that of the first, since clients repeat more often than that.
        """
        abandon_at = time.monotonic() + answer.timeout_s
        earlier = self._unpark(request_id)
        if earlier is not None and not answer.while_asked:
            abandon_at = min(abandon_at, earlier.abandon_at)
        self._parked[request_id] = _Parked(sender, answer, abandon_at)
        self._agenda.at(REQUEST, request_id, abandon_at)
        self._agenda.touch(REQUEST, request_id)

    def _unpark(self, request_id: str) -> _Parked | None:
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self._agenda.drop(REQUEST, request_id, parked.answer.upon)
        return parked

    def take_answers(self) -> list[tuple[Address, RequestReply]]:
        """Return what is to be answered now; everything that it contains must be saved."""
        now = time.monotonic()
        self._agenda.happened(TURN)
        for request_id in self._agenda.take(REQUEST, now):
            if request_id not in self._parked:
                continue
            sender, answer, abandon_at = self._parked[request_id]
            reply = _polled(request_id, answer)
            is_over = now >= abandon_at
            if reply is None and is_over and not answer.while_asked:
                text = "saved, but not every proxy has taken it yet; it will when it answers again"
                reply = RequestReply(request_id=request_id, error_kind="GreenroomError", error=text)
            if reply is not None:
                self._answer(sender, reply)
            if reply is not None or is_over:
                self._unpark(request_id)
            else:
                self._agenda.upon(answer.upon, REQUEST, request_id)
        answers, self._answers = self._answers, []
        return answers

    def _answer(self, sender: Address, reply: RequestReply, *, keep: bool = True) -> None:
        """Owe an answer, and keep it for repeats.

        The client may have repeated its request before it got the answer, and go on by that. What
        was refused, or changed nothing, has no entry in the history, and might change something by
        the time at which the repeat arrives.
        """
        self._answers.append((sender, reply))
        if keep:
            self._answered[reply.request_id] = reply
            if len(self._answered) > MAX_ANSWERED:
                del self._answered[next(iter(self._answered))]

    # --- What is saved, and what could not be ---------------------------------------------------

    def saved(self) -> None:
        """Record that what was taken is on disk, or changes nothing there."""
        self._taken.clear()

    def unfinished(self, error: Exception) -> list[tuple[Address, RequestReply]]:
        """Return what to answer those whose requests were taken in a turn that failed."""
        return [(sender, failure(taken, error)) for taken, sender in self._taken.items()]

    def not_saved(self, changes: Changes, error: Exception) -> list[tuple[Address, RequestReply]]:
        """Return what to answer those whose changes these are, which could not be saved."""
        ids = [record.request_id for (kind, _), record in changes.puts.items() if kind == "history"]
        return [(self._taken[each], not_saved(each, error)) for each in ids if each in self._taken]


def _polled(request_id: str, answer: Later) -> RequestReply | None:
    """Return the reply, if it is time for one.

    An unexpected error must not end the controller: the client would only ask the next one, and
    that would end as well.
    """
    try:
        value = answer.poll()
    except GreenroomError as error:
        return failure(request_id, error)
    except Exception as error:
        logger.exception("the answer to a request that waits failed")
        text = f"{type(error).__name__}: {error}"
        return RequestReply(request_id=request_id, error_kind="GreenroomError", error=text)
    return None if value is PENDING else RequestReply(request_id=request_id, value=value)


def _host_of(sender: Address) -> str:
    details = sender.addressDetails
    host = getattr(details, "host", None) or details.sockname[0]
    return host or "127.0.0.1"


def failure(request_id: str, error: Exception) -> RequestReply:
    """Return the answer to a request that raised."""
    kind = type(error).__name__ if isinstance(error, GreenroomError) else "GreenroomError"
    text = str(error) if kind != "GreenroomError" else f"{FAILED}: {type(error).__name__}: {error}"
    exception = error.exception if isinstance(error, DeployFailedError) else None
    return RequestReply(request_id=request_id, error_kind=kind, error=text, exception=exception)


def not_saved(request_id: str, error: Exception) -> RequestReply:
    """Return the answer to a request whose change the store did not take.

    Where the store failed while it was about to rename, the change may have been made.
    """
    text = f"the state cannot be saved: {error}"
    return RequestReply(request_id=request_id, error_kind=StateNotSavedError.__name__, error=text)
