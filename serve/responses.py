"""What a handle returns for a call: a response that is on its way.

Theory of operation. A response has a future of its answer, which the process's message loop
completes and which nobody cancels but :meth:`DeploymentResponse.cancel`. The answer is unpickled,
once, by who asks for it, never by the message loop, because unpickling runs user code. A call with
responses among its arguments is sent when they have all come: callbacks on their futures hand it to
a small pool of threads, which unpickles them and sends the call, so neither the caller nor the loop
waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from understudy.actors.dispatch import PendingQuery, QueryClient
from understudy.actors.messages import Answer
from understudy.core.errors import RequestCancelledError
from understudy.serve.answers import Outcome, decode

_CHAIN_THREADS = 4
_Submit = Callable[[tuple[Any, ...], dict[str, Any]], PendingQuery]


class DeploymentResponse:
    """The result of a handle's call; await it, or wait for it with :meth:`result`.

    Given as an argument to another handle's call, its value is what arrives there; the caller does
    not wait. Safe to use from several threads and event loops.
    """

    __slots__ = ("_answer", "_cancelled", "_client", "_outcome", "_pending", "_what", "request_id")

    def __init__(self, what: str, client: QueryClient, request_id: str) -> None:
        self.request_id = request_id
        self._what = what
        self._client = client
        self._pending: PendingQuery | None = None
        self._answer: Future[Answer] = Future()
        self._outcome: Outcome | None = None
        self._cancelled = False

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the value; raises what user code raised, or TimeoutError after ``timeout_s``.

        The call goes on after a TimeoutError, and can be waited for again. RuntimeError inside a
        running event loop, which it would block.
        """
        if _is_in_event_loop():
            raise RuntimeError(
                f"result() of {self._what} would block the running event loop; await the response"
            )
        with contextlib.suppress(CancelledError):
            try:
                self._answer.exception(timeout_s)
            except FutureTimeoutError:  # not yet the builtin one on Python 3.10
                text = f"{self._what} has not answered within {timeout_s:g} s"
                raise TimeoutError(text) from None
        return self._take()

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._answer.done():
            yield from self._wait().__await__()
        return self._take()

    def cancel(self) -> None:
        """Cancel the call, wherever it is; it does nothing when the answer is here already.

        Async code on the replica gets asyncio.CancelledError; sync code runs on unheard. Waiting
        for the response then raises RequestCancelledError.
        """
        self._cancelled = True
        if self._pending is not None:
            self._client.cancel(self._pending)
        self._answer.cancel()

    def cancelled(self) -> bool:
        """Tell whether :meth:`cancel` was called, even if it came too late."""
        return self._cancelled

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the response of {self._what} must be an argument of its own, not inside another "
            "object; or wait for it and pass its value"
        )

    def __repr__(self) -> str:
        state = "done" if self._answer.done() else "pending"
        return f"<DeploymentResponse of {self._what}, {state}, request {self.request_id}>"

    def _take(self) -> Any:
        value, error = self._settle()
        if error is not None:
            raise error.with_traceback(None)  # or each wait would add its frames
        return value

    def _settle(self) -> Outcome:
        """Return how the call ended; only once the answer is there."""
        if self._outcome is None:
            try:
                self._outcome = decode(self._answer.result(), self._what)
            except CancelledError:
                text = f"the call to {self._what} was cancelled (request {self.request_id})"
                self._outcome = Outcome(error=RequestCancelledError(text))
            except Exception as error:  # of a response among the arguments
                self._outcome = Outcome(error=error)
        return self._outcome

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        # Not asyncio.wrap_future: when the task is cancelled, it would cancel the answer's future
        # and leave the query running.
        self._answer.add_done_callback(lambda _: _wake(loop, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise


def send(response: DeploymentResponse, submit: _Submit, args: Any, kwargs: Any) -> None:
    """Send the call that ``response`` stands for, at once or when its arguments have come."""
    inputs = [part for part in (*args, *kwargs.values()) if isinstance(part, DeploymentResponse)]
    if inputs:
        _advance(inputs, functools.partial(_send_resolved, response, submit, args, kwargs))
    else:
        response._pending = submit(args, kwargs)
        response._answer = response._pending.future


def _advance(inputs: list[DeploymentResponse], then: Callable[[], None]) -> None:
    """Have ``then`` run on a thread of ours once all inputs are answered."""
    for response in inputs:
        if not response._answer.done():
            response._answer.add_done_callback(lambda _: _advance(inputs, then))
            return
    _pool().submit(then)


def _send_resolved(
    response: DeploymentResponse, submit: _Submit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if response._cancelled:
        return
    try:
        values = tuple(map(_resolved, args))
        named = {name: _resolved(value) for name, value in kwargs.items()}
        pending = submit(values, named)
    except Exception as error:  # of an argument, or of pickling one
        _complete(response._answer, functools.partial(_fail, error=error))
        return
    response._pending = pending
    pending.future.add_done_callback(functools.partial(_copy, response._answer))
    if response._cancelled:  # cancel() came before it could see the query
        response._client.cancel(pending)


def _resolved(value: Any) -> Any:
    if not isinstance(value, DeploymentResponse):
        return value
    outcome = value._settle()
    if outcome.error is not None:
        raise outcome.error.with_traceback(None)
    return outcome.value


def _copy(target: Future[Answer], source: Future[Answer]) -> None:
    if source.cancelled():
        target.cancel()
    else:
        _complete(target, lambda answer: answer.set_result(source.result()))


def _complete(answer: Future[Answer], act: Callable[[Future[Answer]], None]) -> None:
    if answer.set_running_or_notify_cancel():  # False: it was cancelled, and stays so
        act(answer)


def _fail(answer: Future[Answer], error: BaseException) -> None:
    answer.set_exception(error)


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile; nobody waits
        loop.call_soon_threadsafe(wake)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_CHAIN_THREADS, "understudy-chain")
