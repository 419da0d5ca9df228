"""What a handle returns for a call with ``stream=True``: values, as a generator yields them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Generic

from typing_extensions import Self, TypeVar

from greenroom.actors.messages import Answer, FailedAnswer, StreamEnded, ValueAnswer
from greenroom.actors.query_client import PendingQuery
from greenroom.actors.value_streams import ValueStream
from greenroom.core.errors import GreenroomError, RequestCancelledError
from greenroom.serve.answers import decode
from greenroom.serve.responses import in_event_loop, wake

V_co = TypeVar("V_co", covariant=True, default=Any)  # what the generator yields


class DeploymentResponseGenerator(Generic[V_co]):
    """The values of a generator in a replica, as they are made: for ``for`` and ``async for``.

    The generator is at most 768 KiB ahead of what was taken. It ends when this is closed, or
    dropped before its end, and with the query on whose behalf it was called. What it raises is
    raised here, after the values before. For one thread or task at a time.
    """

    __slots__ = ("_cancelled", "_is_over", "_pending", "_stream", "_what")

    def __init__(self, what: str, pending: PendingQuery) -> None:
        self._what = what
        self._pending = pending
        self._stream: ValueStream | None = None  # once it has begun
        self._is_over = False
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """The request id of the call, which its logs show."""
        return self._pending.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> V_co:
        if in_event_loop():
            raise RuntimeError(
                f"a for loop over {self._what} would block the running event loop; use async for"
            )
        while True:
            woken = threading.Event()
            pickled = self._take(woken.set)
            if pickled is not None:
                return self._value(pickled)
            if self._is_over:
                raise StopIteration
            woken.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> V_co:
        loop = asyncio.get_running_loop()
        while True:
            waiter: asyncio.Future[None] = loop.create_future()
            pickled = self._take(partial(wake, loop, waiter))
            if pickled is not None:
                return self._value(pickled)
            if self._is_over:
                raise StopAsyncIteration
            try:
                await waiter
            except asyncio.CancelledError:
                self.close()
                raise

    def close(self) -> None:
        """Want no more values; ends the generator, and iteration here."""
        if not self._is_over:
            self._is_over = True
            self._pending.cancel()

    async def aclose(self) -> None:
        """Do what :meth:`close` does."""
        self.close()

    def cancel(self) -> None:
        """End the generator; who waits for its next value gets RequestCancelledError."""
        self._cancelled = True
        self._pending.cancel()

    def cancelled(self) -> bool:
        """Tell whether :meth:`cancel` was called, even if it came too late."""
        return self._cancelled

    def __del__(self) -> None:
        self.close()  # else it would wait for somebody to go on, and keep its slot

    def __await__(self) -> Any:
        raise TypeError(f"the response of {self._what} is a stream; use async for")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the response of {self._what} is a stream, which cannot be passed on; pass its values"
        )

    def __repr__(self) -> str:
        state = "over" if self._is_over else "pending" if self._stream is None else "streaming"
        of = f"{self._what}, {state}, request {self.request_id}"
        return f"<DeploymentResponseGenerator of {of}>"

    def _take(self, woken: Callable[[], None]) -> bytes | None:
        """Return the next value; None when it is over, or ``woken`` will be called."""
        if self._is_over:
            return None
        if self._stream is None and not self._begin(woken):
            return None
        stream = self._stream
        if stream is None:
            return None
        pickled = stream.next(woken)
        if pickled is None and (end := stream.end) is not None:
            self._end(end)
        return pickled

    def _begin(self, woken: Callable[[], None]) -> bool:
        """Take the stream, once it has begun; raise what came in its place."""
        future = self._pending.future
        if not future.done():
            future.add_done_callback(lambda _: woken())
            return False
        try:
            answer = future.result()
        except CancelledError:
            answer = FailedAnswer(0, "RequestCancelledError", "cancelled")
        except Exception:  # it could not be sent when its arguments had come
            self._is_over = True
            raise
        if isinstance(answer, ValueStream):
            self._stream = answer
        else:
            self._end(answer)
        return True

    def _end(self, end: Answer) -> None:
        """Stop here; raise what has ended the stream, unless that was its end."""
        self._is_over = True
        if self._cancelled or getattr(end, "kind", "") == "RequestCancelledError":
            text = f"the call to {self._what} was cancelled (request {self.request_id})"
            raise RequestCancelledError(text)
        if isinstance(end, FailedAnswer):
            error = decode(end, self._what).error
            raise error or GreenroomError(f"{self._what} has failed")
        if not isinstance(end, StreamEnded):
            raise GreenroomError(f"{self._what} answered a call for a stream with a whole value")

    def _value(self, pickled: bytes) -> V_co:
        value: V_co
        value, error = decode(ValueAnswer(0, pickled), self._what)
        if error is not None:
            self.close()
            raise error
        return value
