"""The replica: one actor running one copy of the user's code."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from understudy.actors import dispatch
from understudy.actors.base import LoopActor, redirect_output
from understudy.actors.loop import Outbox
from understudy.actors.messages import (
    Address,
    Answer,
    AnswerQueries,
    Assignment,
    AttachCallerReply,
    CheckReplica,
    FailedAnswer,
    HttpAnswer,
    MeetProxy,
    Outcome,
    QueriesFinished,
    ReconfigureReplica,
    ReplicaReported,
    RunQueries,
    StartReplica,
    StopReplica,
    ValueAnswer,
)
from understudy.actors.processes import descendants, kill_all
from understudy.actors.user_code import Failure, UserCode
from understudy.core.errors import error_status

logger = logging.getLogger(__name__)

CANCELLED_STATUS = 499
EXIT_CHECK_S = 0.02


class Replica(LoopActor):
    """Runs queries for any proxy, and answers straight to whoever asked.

    A query's slot is free when user code has returned. The router hears of an outcome only after
    its answer was taken by the caller: if this process dies in between, the query is still the
    router's, which sends it to another replica.
    """

    role = "replica"

    def started(self) -> None:
        """See :meth:`LoopActor.started`."""
        self._controller: Address | None = None
        self._load_id: int | None = None  # the config's with which user code is loaded
        self._tag = ""  # known from the first order
        self._config: dict[str, Any] = {}
        self._config_id = 0  # the newest taken
        self._applied_id = 0  # the newest that user code has taken too
        self._state = "idle"
        self._failure: Failure | None = None
        self._user_code: UserCode | None = None
        self._running = 0  # queries in user code; never above max_ongoing_requests
        self._answers: dict[str, Outbox] = {}  # by the caller's incarnation
        self._outcomes: dict[str, Outbox] = {}  # by the proxy's incarnation
        self._undelivered = 0
        self._caller = dispatch.Caller(self.loop, self.process)
        dispatch.install(dispatch.QueryClient(self._caller))

    # --- Lifecycle, by the controller's orders ------------------------------------------------

    def receiveMsg_StartReplica(self, message: StartReplica, sender: Address) -> None:
        """Load the code, once; a repeat, from this controller or a new one, gets a report."""
        if not self._is_for_me(message, sender):
            return
        if self._load_id is None:
            self._begin_loading(message)
        elif message.config_id > self._config_id:
            self._apply_config(message.config, message.config_id)
        self._report()

    def receiveMsg_ReconfigureReplica(self, message: ReconfigureReplica, sender: Address) -> None:
        """Take newer settings; user code hears of a changed user_config."""
        if not self._is_for_me(message, sender):
            return
        if message.config_id > self._config_id:
            self._apply_config(message.config, message.config_id)
        else:
            self._report()

    def receiveMsg_CheckReplica(self, message: CheckReplica, sender: Address) -> None:
        """Run the user's check_health and report."""
        if not self._is_for_me(message, sender):
            return
        if self._user_code is None or self._state != "running":
            self._report(check_id=message.check_id)
        else:
            self._user_code.check_health(
                lambda failure: self._report(check_id=message.check_id, failure=failure)
            )

    def receiveMsg_StopReplica(self, message: StopReplica, sender: Address) -> None:
        """Finish what runs, within ``drain_s``, then end the process."""
        if not self._is_for_me(message, sender) or self._state == "draining":
            return
        self._state = "draining"
        self._report(then=self._drain)
        self.loop.call_later(max(message.drain_s, EXIT_CHECK_S), self._leave)

    def _is_for_me(
        self,
        message: StartReplica | ReconfigureReplica | CheckReplica | StopReplica,
        controller: Address,
    ) -> bool:
        """Take an order of the controller; ports are reused, so it may be for a dead replica."""
        if self._tag not in {"", message.replica}:
            logger.warning("%s ignored an order for %s", self._tag, message.replica)
            return False
        self._tag, self._controller = message.replica, controller
        return True

    def receiveMsg_MeetProxy(self, message: MeetProxy, _sender: Address) -> None:
        """Send the queries of handles made here to this proxy."""
        self._caller.met_proxy(message.proxy, message.process)

    def receiveMsg_AttachCallerReply(self, message: AttachCallerReply, _sender: Address) -> None:
        """Take note that the proxy knows this replica as a caller."""
        self._caller.attached(message)

    def receiveMsg_AnswerQueries(self, message: AnswerQueries, _sender: Address) -> None:
        """Take the answers to queries of handles made here."""
        self._caller.answered(message)

    def exiting(self) -> None:
        """Thespian asks the process to end: the system shuts down."""
        super().exiting()
        kill_all(descendants([self.process.pid]))  # what user code has started
        os._exit(0)  # user threads may never end, and Thespian would wait for them

    # --- Queries ------------------------------------------------------------------------------

    def receiveMsg_RunQueries(self, message: RunQueries, sender: Address) -> None:
        """Run what there is room for, reject the rest."""
        if message.incarnation != self.process.incarnation:
            return  # meant for a dead process whose port this one has
        proxy = message.proxy.incarnation
        if proxy not in self._outcomes:
            self._outcomes[proxy] = Outbox(
                self.loop, sender, self._pack_outcomes, on_failed=lambda _: self._forget(proxy)
            )
        room = self._room()
        accepted, rejected = message.assignments[:room], message.assignments[room:]
        self._running += len(accepted)
        if accepted and self._user_code is not None:
            self._user_code.run_all(
                [
                    ((proxy, item.ticket), item, partial(self._finished, proxy, item))
                    for item in accepted
                ]
            )
        for item in rejected:
            self._outcomes[proxy].put(item.ticket)
        if self._user_code is not None:
            for ticket in message.cancelled:
                self._user_code.cancel((proxy, ticket))

    def _room(self) -> int:
        if self._state != "running":
            return 0
        limit: int = self._config["max_ongoing_requests"]
        return max(limit - self._running, 0)

    def _finished(
        self, proxy: str, assignment: Assignment, answer: Answer | None, seconds: float
    ) -> None:
        self._running -= 1
        outcome = Outcome(assignment.ticket, _status(answer), seconds)
        if answer is None:
            self._ended(proxy, outcome)
            return
        caller = assignment.caller_incarnation
        if caller not in self._answers:
            self._answers[caller] = Outbox(
                self.loop,
                assignment.caller,
                lambda items: AnswerQueries(
                    incarnation=caller, answers=tuple(item[0] for item in items)
                ),
                on_sent=self._answered,
                on_failed=lambda items: self._unanswerable(caller, items),
                weigh=lambda item: _weigh(item[0]),
            )
        self._undelivered += 1
        self._answers[caller].put((answer, proxy, outcome))

    def _answered(self, items: list[tuple[Answer, str, Outcome]]) -> None:
        self._undelivered -= len(items)
        for _, proxy, outcome in items:
            self._ended(proxy, outcome)

    def _unanswerable(self, caller: str, items: list[tuple[Answer, str, Outcome]]) -> None:
        outbox = self._answers.pop(caller, None)  # the caller is gone
        self._answered(items + (outbox.drop() if outbox is not None else []))

    def _ended(self, proxy: str, outcome: Outcome) -> None:
        if proxy in self._outcomes:
            self._outcomes[proxy].put(outcome)

    def _forget(self, proxy: str) -> None:
        self._outcomes.pop(proxy, None)

    def _pack_outcomes(self, items: list[Outcome | int]) -> QueriesFinished:
        return QueriesFinished(
            replica=self._tag,
            incarnation=self.process.incarnation,
            finished=tuple(item for item in items if isinstance(item, Outcome)),
            rejected=tuple(item for item in items if isinstance(item, int)),
            draining=self._state == "draining",
        )

    # --- User code's life ---------------------------------------------------------------------

    def _begin_loading(self, order: StartReplica) -> None:
        self._state = "starting"
        self._config, self._config_id = order.config, order.config_id
        self._load_id = order.config_id
        file_name = re.sub(r"[^\w.#:-]", "_", order.replica)
        redirect_output(self.settings, f"replica-{file_name}")
        self.records.add(self.process, "replica", f"replica {order.replica}")
        self._user_code = UserCode(self.loop.post)
        self._user_code.load(order.code, self._config["user_config"], self._loaded)

    def _loaded(self, failure: Failure | None) -> None:
        self._failure = failure
        if failure is not None:
            logger.error("%s could not start: %s", self._tag, failure.traceback)
        self._applied_id = max(self._applied_id, self._load_id or 0)
        if self._state == "starting":
            self._state = "failed" if failure is not None else "running"
        self._report()

    def _apply_config(self, config: dict[str, Any], config_id: int) -> None:
        """Take newer settings; they count as applied when user code has taken its part of them."""
        changed = config["user_config"] != self._config["user_config"]
        self._config, self._config_id = config, config_id
        if changed and self._user_code is not None:
            self._user_code.reconfigure(
                config["user_config"], lambda failure: self._applied(config_id, failure)
            )
        else:
            self._applied(config_id, None)

    def _applied(self, config_id: int, failure: Failure | None) -> None:
        self._applied_id = max(self._applied_id, config_id)
        self._report(failure=failure)

    def _report(
        self,
        check_id: int = 0,
        failure: Failure | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Report to the controller; ``then`` is called when it was taken, or cannot be."""
        if self._controller is None:
            return
        failure = failure or self._failure
        self.loop.send(
            self._controller,
            ReplicaReported(
                replica=self._tag,
                process=self.process,
                state=self._state,
                config_id=self._applied_id,
                check_id=check_id,
                ongoing=self._running,
                error="" if failure is None else failure.traceback,
                exception=None if failure is None else failure.exception,
            ),
            on_sent=then,
            on_failed=then,
        )

    def _drain(self) -> None:
        if self._running or self._undelivered:
            self.loop.call_later(EXIT_CHECK_S, self._drain)
        elif self._user_code is None:
            self._leave()
        else:
            self._user_code.close(lambda _failure: self._leave())

    def _leave(self) -> None:
        self.exiting()


def _status(answer: Answer | None) -> int:
    if answer is None:
        return CANCELLED_STATUS
    if isinstance(answer, HttpAnswer):
        return answer.status
    return error_status(answer.kind) if isinstance(answer, FailedAnswer) else 200


def _weigh(answer: Answer) -> int:
    if isinstance(answer, HttpAnswer):
        return len(answer.body)
    return len(answer.value) if isinstance(answer, ValueAnswer) else 0
