"""Clients, by which handles call endpoints by name, from any thread.

A replica installs one client for its process. A script gets one from its connection, and local
testing has its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from greenroom.actors.caller.caller import CLOSED, Caller
from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import Answer, Query
from greenroom.actors.runtime.loop import Callback
from greenroom.core.errors import NotRunningError


class PendingQuery:
    """A call that is made, or is going to be once it can be; its future gets the answer."""

    __slots__ = ("_client", "_stream", "future", "id", "request_id")

    def __init__(self, client: QueryClient, query_id: int, request_id: str) -> None:
        self._client = client
        self.id = query_id
        self.request_id = request_id
        self.future: Future[Answer | Stream] = Future()
        self._stream: Stream | None = None

    def answered(self, answer: Any) -> None:
        """Give the future its result, unless it was cancelled or has failed."""
        if isinstance(answer, Stream):
            self._stream = answer
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(answer)

    def failed(self, error: BaseException) -> None:
        """Make the future raise, unless it was cancelled or is answered."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)

    def cancel(self) -> None:
        """Cancel the future, and the query wherever it is; harmless when it is answered."""
        if self.future.cancel():
            self._client.cancel(self)
        elif self._stream is not None:
            self._stream.close()

    def when_over(self, callback: Callback) -> None:
        """Call when the answer has come, to its end, or the call was cancelled; on any thread."""
        self.future.add_done_callback(partial(_when_over, callback))


def _when_over(callback: Callback, future: Future[Answer | Stream]) -> None:
    has_answer = not (future.cancelled() or future.exception())
    if has_answer and isinstance(stream := future.result(), Stream):
        stream.when_over(callback)
    else:
        callback()


class QueryClient:
    """Numbers queries and sends them; thread-safe. What sends them is a subclass."""

    def __init__(self, next_id: Callable[[], int]) -> None:
        self._next_id = next_id

    def pending(self, request_id: str) -> PendingQuery:
        """Return what stands for a call that is to be sent."""
        return PendingQuery(self, self._next_id(), request_id)

    def send(self, query: Query, pending: PendingQuery) -> None:
        """Send a query with the id of ``pending``, whose future gets the answer, whatever it is.

        NotRunningError where no answer would ever come.
        """
        raise NotImplementedError

    def cancel(self, pending: PendingQuery) -> None:
        """Drop a query wherever it is; its future is cancelled."""
        raise NotImplementedError


class CallerClient(QueryClient):
    """A face of :class:`Caller` for all threads."""

    def __init__(self, caller: Caller) -> None:
        super().__init__(caller.next_id)
        self._caller = caller

    def send(self, query: Query, pending: PendingQuery) -> None:
        """See :meth:`QueryClient.send`."""
        if self._caller.process.pid != os.getpid():
            raise NotRunningError("this handle was made before a fork; get another one after it")
        self._caller.loop.run(partial(self._submit, query, pending))
        if self._caller.left:  # not before: what is posted to a loop that has ended is dropped
            raise NotRunningError(f"{CLOSED}; get another handle from one that is open")

    def _submit(self, query: Query, pending: PendingQuery) -> None:
        if not pending.future.cancelled():  # else its cancel came before it
            self._caller.submit(query, pending.answered)

    def cancel(self, pending: PendingQuery) -> None:
        """See :meth:`QueryClient.cancel`. Posted: a finalizer may be anywhere in the caller."""
        self._caller.loop.post(partial(self._caller.cancel, pending.id))


_installed: QueryClient | None = None


def install(client: QueryClient | None) -> None:
    """Make ``client`` the one that handles in this process use; a replica does it at its start."""
    global _installed  # noqa: PLW0603  # one per process, like the process's actor
    _installed = client


def current() -> QueryClient | None:
    """Return the process's own query client, or None outside replicas."""
    return _installed
