"""What a handle returns for a call: a response that is on its way.

Theory of operation. A response has a future of its answer, which the process's message loop
completes and which nobody cancels but :meth:`DeploymentResponse.cancel`. The answer is unpickled,
once, by who asks for it, never by the message loop, because unpickling runs user code. A call with
responses among its arguments is pickled at once, and sent when they have all come: what they
returned goes along as it came, and is unpickled where it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic

from typing_extensions import TypeVar

from greenroom.actors.messages import Input, ValueAnswer
from greenroom.actors.query_client import PendingQuery
from greenroom.core.errors import RequestCancelledError
from greenroom.serve.answers import Outcome, decode
from greenroom.serve.checks import check_timeout

R_co = TypeVar("R_co", covariant=True, default=Any)  # what the call returns


class DeploymentResponse(Generic[R_co]):
    """The result of a handle's call; await it, or wait for it with :meth:`result`.

    Given as an argument to another handle's call, its value is what arrives there; the caller does
    not wait. Safe to use from several threads and event loops.
    """

    __slots__ = ("_cancelled", "_outcome", "_pending", "_what")

    def __init__(self, what: str, pending: PendingQuery) -> None:
        self._what = what
        self._pending = pending
        self._outcome: Outcome | None = None
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """The request id of the call, which its logs show."""
        return self._pending.request_id

    def result(self, timeout_s: float | None = None) -> R_co:
        """Wait for the value; raises what user code raised, or TimeoutError after ``timeout_s``.

        The call goes on after a TimeoutError, and can be waited for again. RuntimeError inside a
        running event loop, which it would block.
        """
        if in_event_loop():
            raise RuntimeError(
                f"result() of {self._what} would block the running event loop; await the response"
            )
        check_timeout("timeout_s", timeout_s)
        with contextlib.suppress(CancelledError):
            try:
                self._pending.future.exception(timeout_s)
            except FutureTimeoutError:  # not yet the builtin one on Python 3.10
                text = f"{self._what} has not answered within {timeout_s:g} s"
                raise TimeoutError(text) from None
        return self._take()

    def __await__(self) -> Generator[Any, None, R_co]:
        if not self._pending.future.done():
            yield from self._wait().__await__()
        return self._take()

    def cancel(self) -> None:
        """Cancel the call, wherever it is; it does nothing when the answer is here already.

        Async code on the replica gets asyncio.CancelledError; sync code runs on unheard. Waiting
        for the response then raises RequestCancelledError.
        """
        self._cancelled = True
        self._pending.cancel()

    def cancelled(self) -> bool:
        """Tell whether :meth:`cancel` was called, even if it came too late."""
        return self._cancelled

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the response of {self._what} must be an argument of its own, not inside another "
            "object; or wait for it and pass its value"
        )

    def __repr__(self) -> str:
        state = "done" if self._pending.future.done() else "pending"
        return f"<DeploymentResponse of {self._what}, {state}, request {self.request_id}>"

    def _take(self) -> R_co:
        value: Any
        value, error = self._settle()
        if error is not None:
            raise error.with_traceback(None)  # or each wait would add its frames
        taken: R_co = value
        return taken

    def _settle(self) -> Outcome:
        """Return how the call ended; only once the answer is there."""
        if self._outcome is None:
            try:
                self._outcome = decode(self._pending.future.result(), self._what)
            except CancelledError:
                text = f"the call to {self._what} was cancelled (request {self.request_id})"
                self._outcome = Outcome(error=RequestCancelledError(text))
            except _InputFailedError as failure:
                self._outcome = failure.response._settle()
            except Exception as error:  # it could not be sent when its arguments had come
                self._outcome = Outcome(error=error)
        return self._outcome

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        # Not asyncio.wrap_future: when the task is cancelled, it would cancel the answer's future
        # and leave the query running.
        self._pending.future.add_done_callback(lambda _: wake(loop, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise


class _InputFailedError(Exception):
    """A call was not sent, because a response among its arguments is no value."""

    def __init__(self, response: DeploymentResponse) -> None:
        super().__init__(response)
        self.response = response


def take_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[DeploymentResponse]]:
    """Return the arguments with an Input for each response among them, and the responses."""
    inputs: list[DeploymentResponse] = []

    def taken(value: Any) -> Any:
        if not isinstance(value, DeploymentResponse):
            return value
        inputs.append(value)
        return Input(len(inputs) - 1)

    return tuple(map(taken, args)), {name: taken(value) for name, value in kwargs.items()}, inputs


def send(
    pending: PendingQuery,
    inputs: list[DeploymentResponse],
    submit: Callable[[tuple[bytes, ...]], None],
) -> None:
    """Send a call with what its inputs returned, at once or when they have come.

    It raises what ``submit`` raises at once; what comes later is the call's outcome.
    """
    if inputs:
        _advance(pending, inputs, submit)
    else:
        submit(())


def _advance(
    pending: PendingQuery,
    inputs: list[DeploymentResponse],
    submit: Callable[[tuple[bytes, ...]], None],
) -> None:
    for response in inputs:
        future = response._pending.future
        if not future.done():
            future.add_done_callback(lambda _: _advance(pending, inputs, submit))
            return
    if pending.future.cancelled():
        return
    try:
        submit(tuple(map(_value_of, inputs)))
    except Exception as error:
        pending.failed(error)


def _value_of(response: DeploymentResponse) -> bytes:
    """Return what a call has returned, as it came."""
    future = response._pending.future
    if not future.cancelled() and future.exception() is None:
        answer = future.result()
        if isinstance(answer, ValueAnswer):
            return answer.value
    raise _InputFailedError(response)


def wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """Wake a task of that loop; from any thread."""

    def now() -> None:
        if not waiter.done():
            waiter.set_result(None)

    if asyncio._get_running_loop() is loop:  # in a replica answers arrive on user code's loop
        now()
        return
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile; nobody waits
        loop.call_soon_threadsafe(now)


def in_event_loop() -> bool:
    """Tell whether the calling thread runs an event loop, which must not be blocked."""
    return asyncio._get_running_loop() is not None
