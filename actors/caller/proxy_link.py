"""A caller's link to its host's proxy: what is with the proxy, and what waits for one.

Theory of operation. Queries go to the proxy in batches, once it has said that it has tables. When
the proxy dies, all queries wait for the next proxy, or for their answers. A query that was already
sent may have run, so it goes to the next proxy with a mark that says so: whether it may run again
depends on its endpoint and deployment, which proxies know. Only a query whose own caller forbids
retries fails at once. Retries after the deaths of proxies have a budget, like retries after the
deaths of replicas in the router.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from greenroom.actors.caller.open_queries import OpenQuery, weigh
from greenroom.actors.messages.queries import (
    Address,
    AttachCaller,
    DetachCaller,
    FailedAnswer,
    Process,
    SubmitQueries,
)
from greenroom.actors.runtime.loop import Callback, Loop, Outbox, Timer
from greenroom.core.errors import DeploymentUnavailableError
from greenroom.core.routing.retries import RetryBudget

RESEND_S = 0.1
NO_PROXY_S = 30.0  # longer than any restart; a query waits no longer for a proxy with tables
# For queries that were with a proxy that died. It is larger than the router's budget: a query
# hardly ever kills a proxy, and one that takes long may see several die.
FIRST_REPEATS, MOST_REPEATS = 100, 1_000


class ProxyLink:
    """Sends the queries of a caller; ``fail`` answers one with an error, wherever it is."""

    def __init__(
        self,
        loop: Loop,
        caller: Process,
        queries: Mapping[int, OpenQuery],
        fail: Callable[[OpenQuery, FailedAnswer], None],
    ) -> None:
        self.process: Process | None = None
        self.address: Address | None = None
        self._loop = loop
        self._caller = caller
        self._queries = queries
        self._fail = fail
        self._budget = RetryBudget(FIRST_REPEATS)
        self._outbox: Outbox | None = None  # to a proxy with tables
        # What waits for a proxy with tables, and until when, in the loop's time.
        self._waiting: deque[tuple[float, OpenQuery]] = deque()
        self._patience: Timer | None = None  # armed while anything waits

    @property
    def is_ready(self) -> bool:
        """Whether there is a proxy, and it has tables."""
        return self._outbox is not None

    def send(self, message: Any) -> None:
        """Send the proxy a message; drop it while there is none."""
        if self.address is not None:
            self._loop.send(self.address, message)

    def put(self, entry: OpenQuery) -> None:
        """Send a query; without a proxy that has tables, once there is one."""
        self._budget.pay_in(max(MOST_REPEATS, len(self._queries)))
        if self._outbox is None:
            self._wait(entry)
        else:
            self._outbox.put(entry)

    def cancel(self, query_id: int) -> None:
        """Have a query dropped."""
        if self._outbox is not None:
            self._outbox.put(query_id)

    def leave(self, on_left: Callback) -> None:
        """Have the proxy forget this caller with all its queries; then ``on_left``.

        Nothing more is taken from it: a lease that came now would be open for as long as this
        process lives.
        """
        self.process = None
        if self.address is None:
            on_left()
            return
        if self._outbox is not None:
            self._outbox.drop()
        detach = DetachCaller(incarnation=self._caller.incarnation)
        self._loop.send(self.address, detach, on_left, on_left)

    # --- One proxy after the other ------------------------------------------------------------

    def meet(self, address: Address, process: Process) -> None:
        """Use this proxy from now on, once it has tables."""
        self.address, self.process = address, process
        self.send(AttachCaller(process=self._caller, splits=True))

    def has_tables(self) -> None:
        """Send the proxy everything that waits, which may take as long there as it is let."""
        if self._outbox is not None:
            return
        outbox = self._outbox = Outbox(
            self._loop, self.address, self._pack, on_failed=self._undelivered, weigh=weigh
        )
        self._waiting.clear()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        for entry in list(self._queries.values()):
            if entry.replica is None and entry.share is None:
                outbox.put(entry)

    def gone(self) -> None:
        """Keep what was with the proxy for the next one, unless it must not be sent again.

        A query that only one replica can answer needs no proxy any more.
        """
        had_queries = self.is_ready
        if self._outbox is not None:
            self._outbox.drop()  # what has not left goes to the next proxy, from the table
        self.process = self.address = self._outbox = None
        for entry in list(self._queries.values()) if had_queries else ():
            if entry.share is not None:
                continue
            was_sent, entry.is_sent = entry.is_sent, False
            if entry.replica is not None:
                self.watch(entry)
            elif not was_sent or self._may_be_sent_again(entry):
                self._wait(entry)

    def watch(self, entry: OpenQuery) -> None:
        """Notice the end of the replica that answers, where no proxy has the query to report it."""
        if entry.exchange is not None and not entry.is_sent:
            died = unavailable(entry.query.id, REPLICA_DIED)
            entry.exchange.watch(partial(self._fail, entry, died))

    def _may_be_sent_again(self, entry: OpenQuery) -> bool:
        """Mark a query that may have run for its dead proxy, or fail it."""
        text = "the proxy died with the query under way"
        if entry.query.retryable is False:
            self._fail(entry, unavailable(entry.query.id, f"{text}; it may have run"))
        elif not self._budget.take_out():
            text = f"{text}, and retries, limited to as many as queries, are used up"
            self._fail(entry, unavailable(entry.query.id, text))
        else:
            entry.is_resent = True
        return entry.is_wanted

    def _wait(self, entry: OpenQuery) -> None:
        self._waiting.append((self._loop.asyncio.time() + NO_PROXY_S, entry))
        if self._patience is None:
            self._patience = self._loop.call_later(NO_PROXY_S, self._abandon)

    def _abandon(self) -> None:
        """Fail what has waited for so long; a replica that answers needs no proxy."""
        self._patience = None
        error, now = DeploymentUnavailableError, self._loop.asyncio.time()
        text = f"no proxy has had route tables for {NO_PROXY_S:g} s; see `greenroom status`"
        while self._waiting and self._waiting[0][0] <= now:
            _, entry = self._waiting.popleft()
            if entry.replica is None:
                answer = FailedAnswer(entry.query.id, error.__name__, text, error.retry_after_s)
                self._fail(entry, answer)
        if self._waiting:
            self._patience = self._loop.call_later(self._waiting[0][0] - now, self._abandon)

    # --- What is sent -------------------------------------------------------------------------

    def _pack(self, items: list[OpenQuery | int]) -> SubmitQueries:
        queries, cancelled, resent, lost, refused, failed, died = [], [], [], [], [], [], []
        for item in items:
            if isinstance(item, int):
                cancelled.append(item)
            elif item.is_wanted and (item.replica is None or item.died):  # else that answers it
                item.is_sent, query_id = True, item.query.id
                queries.append(item.query)
                if item.is_resent:
                    resent.append(query_id)
                if item.died:
                    lost.append((query_id, 1))  # it has been under a lease once at most
                    died.append((query_id, item.died))
                if item.is_refused:
                    refused.append(query_id)
                if item.failed_at:
                    failed.append((query_id, item.failed_at, time.monotonic() - item.submitted_at))
        return SubmitQueries(
            incarnation=self._caller.incarnation,
            queries=tuple(queries),
            cancelled=tuple(cancelled),
            resent=tuple(resent),
            lost=tuple(lost),
            refused=tuple(refused),
            failed=tuple(failed),
            died=tuple(died),
        )

    def _undelivered(self, items: list[OpenQuery | int]) -> None:
        """React to a failed delivery; the proxy may have processed it all the same."""
        for item in items:
            if isinstance(item, int) or not item.is_wanted:
                continue
            if item.query.retryable is False:
                text = "the proxy did not take the query, or died with it; it may have run"
                self._fail(item, unavailable(item.query.id, text))
            else:  # the budget pays once, at the proxy's death if that was the reason
                item.is_resent = True
                self._loop.call_later(RESEND_S, partial(self._resend, item))

    def _resend(self, entry: OpenQuery) -> None:
        if entry.is_wanted and self._outbox is not None:
            self._outbox.put(entry)


REPLICA_DIED = "its replica died with the query under way"


def unavailable(query_id: int, text: str) -> FailedAnswer:
    """Return the answer that says why a query could not be answered."""
    return FailedAnswer(query_id, "ReplicaUnavailableError", text, 1.0)
