"""One copy of the user's code, on a thread and event loop of its own.

Theory of operation. The actor's message loop must answer within 100 ms whatever user code does, so
user code never runs on it: async code runs as tasks on this module's event loop, sync code on at
most min(32, max_ongoing_requests) threads, ``check_health`` on a thread of its own. What finishes
is handed back through ``post``, the loop's thread-safe entry. A running sync call cannot be
stopped; cancelling it only drops its answer, and it holds its slot until it returns. Whatever user
code raises, SystemExit and CancelledError too, ends its own call and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import cloudpickle

from understudy.actors.messages import (
    Answer,
    Assignment,
    FailedAnswer,
    HttpCall,
    PythonCall,
    Query,
    ValueAnswer,
)
from understudy.core.errors import (
    DeployFailedError,
    InvalidRequestError,
    UnderstudyError,
    UnsupportedResultError,
)

MAX_THREADS = 32
# The message thread waits for the interpreter lock at each of its twenty or so system calls per
# message, and asks for it only after a switch interval in which nobody let go of it. User code that
# lets go of it for a moment more often than that, say with a stat() per millisecond, starves it:
# seen, with 1 ms, control messages 4 s late; with 20 us, below 20 ms. Shorter costs computing
# threads a third of their speed.
SWITCH_INTERVAL_S = 0.00002
PR_SET_TIMERSLACK = 29  # prctl(2); without it, timed waits are 50 us late


class Failure(NamedTuple):
    """An exception of user code, in a form that travels."""

    text: str  # type and message
    traceback: str
    exception: bytes | None  # cloudpickled, where it can be

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe ``error``."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)  # many exceptions pickle and then cannot be made again
        except Exception:  # any user type may fail in any way; the text goes without it
            pickled = None
        return cls(text, trace, pickled)


OnDone = Callable[[Answer | None, float], None]  # the answer, None if cancelled; the seconds
Start = tuple[Any, Assignment, OnDone]  # a key of the caller's to cancel it by, and what to run


class UserCode:
    """Loads and runs user code; ``post(callback)`` runs a callback on the actor's loop."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        # It starts threads only when none is idle, so never more than the calls that were let in.
        self._pool = ThreadPoolExecutor(MAX_THREADS, "user")
        self._health_pool = ThreadPoolExecutor(1, "health")
        self._tasks: dict[Any, asyncio.Task[Answer]] = {}
        self._cancelled: set[Any] = set()  # tasks, cancelled by us and not by user code
        self._callable: Any = None
        self._loop = asyncio.new_event_loop()
        self._changing = asyncio.Lock()  # load, reconfigure and close come one after the other
        self._thread = threading.Thread(target=self._run_loop, name="user-loop", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread, the message loop's
        self._thread.start()

    def load(
        self, code: bytes, user_config: Any, on_done: Callable[[Failure | None], None]
    ) -> None:
        """Unpickle the code, construct its instance, call reconfigure."""
        self._spawn(self._load(code, user_config), on_done)

    def reconfigure(self, user_config: Any, on_done: Callable[[Failure | None], None]) -> None:
        """Call the instance's reconfigure with the new user_config."""
        self._spawn(self._reconfigure(user_config), on_done)

    def check_health(self, on_done: Callable[[Failure | None], None]) -> None:
        """Call the instance's check_health, where it has one."""
        check = getattr(self._callable, "check_health", None)
        if check is None or inspect.isclass(self._callable):
            on_done(None)
        elif _is_async(check):
            self._spawn(check(), on_done)
        else:  # not by way of the event loop, which user code may be blocking

            def finished(call: Future[tuple[Any, BaseException | None]]) -> None:
                error = call.result()[1]
                failure = None if error is None else Failure.of(error)
                self._post(lambda: on_done(failure))

            self._health_pool.submit(_outcome_of, check, (), {}).add_done_callback(finished)

    def close(self, on_done: Callable[[Failure | None], None]) -> None:
        """Call the instance's ``__del__``, where it has one."""
        self._spawn(self._close(), on_done)

    def run_all(self, starts: list[Start]) -> None:
        """Run a batch of queries, with one wake-up of the user loop for all."""
        self._loop.call_soon_threadsafe(self._start_all, starts)

    def cancel(self, key: Any) -> None:
        """Cancel a query: async code gets CancelledError, sync code runs on unheard."""
        self._loop.call_soon_threadsafe(self._cancel, key)

    def _start_all(self, starts: list[Start]) -> None:
        for key, assignment, on_done in starts:
            task = self._loop.create_task(self._answer(assignment))
            self._tasks[key] = task
            task.add_done_callback(partial(self._ended, key, on_done, time.monotonic()))

    def _ended(
        self, key: Any, on_done: OnDone, begun_at: float, task: asyncio.Task[Answer]
    ) -> None:
        # Not at the end of the task's own code, which never begins if it is cancelled at once.
        del self._tasks[key]
        self._cancelled.discard(task)
        answer = None if task.cancelled() else task.result()
        seconds = time.monotonic() - begun_at
        self._post(lambda: on_done(answer, seconds))

    def _cancel(self, key: Any) -> None:
        task = self._tasks.get(key)
        if task is not None and task not in self._cancelled:
            self._cancelled.add(task)
            task.cancel()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._loop.is_closed():
            # A task of the user's own may raise SystemExit through it, or stop it.
            try:
                self._loop.run_forever()
            except BaseException:
                _print(traceback.format_exc())
        os._exit(1)  # closed by user code: nothing can be answered any more

    def _spawn(self, coroutine: Any, on_done: Callable[[Failure | None], None]) -> None:
        async def guarded() -> None:
            failure = None
            try:
                await coroutine
            except BaseException as error:  # sys.exit() in a constructor must not end the loop
                failure = Failure.of(error)
            self._post(lambda: on_done(failure))

        asyncio.run_coroutine_threadsafe(guarded(), self._loop)

    async def _load(self, code: bytes, user_config: Any) -> None:
        async with self._changing:
            await self._make(code)
            if user_config is not None:
                await self._call_reconfigure(user_config)

    async def _make(self, code: bytes) -> None:
        try:
            target, args, kwargs = cloudpickle.loads(code)
        except DeployFailedError:
            raise  # see lost_code
        except Exception as error:
            raise DeployFailedError(
                f"the deployment's code cannot be unpickled on this host: "
                f"{type(error).__name__}: {error}; is everything that it imports installed here?"
            ) from error
        if inspect.isclass(target):
            self._callable = await self._construct(target, args, kwargs)
        else:
            self._callable = target

    async def _construct(self, cls: Any, args: Any, kwargs: Any) -> Any:
        if not inspect.iscoroutinefunction(cls.__init__):
            return cls(*args, **kwargs)
        instance = cls.__new__(cls)
        await instance.__init__(*args, **kwargs)
        return instance

    async def _reconfigure(self, user_config: Any) -> None:
        async with self._changing:
            await self._call_reconfigure(user_config)

    async def _call_reconfigure(self, user_config: Any) -> None:
        method = getattr(self._callable, "reconfigure", None)
        if method is None:
            raise DeployFailedError(
                "user_config is set, but the deployment has no reconfigure(user_config) method"
            )
        await self._invoke(method, (user_config,), {}, self._pool)

    async def _close(self) -> None:
        async with self._changing:
            finalizer = getattr(type(self._callable), "__del__", None)
            if finalizer is not None:
                await self._invoke(finalizer, (self._callable,), {}, self._pool)

    async def _invoke(self, function: Any, args: Any, kwargs: Any, pool: Any) -> Any:
        if _is_async(function):
            return await function(*args, **kwargs)
        call = pool.submit(_outcome_of, function, args, kwargs)
        future = asyncio.wrap_future(call, loop=self._loop)
        try:
            result, error = await asyncio.shield(future)
        except asyncio.CancelledError:
            if not call.cancel():  # it runs; its answer is no longer wanted
                await future
            raise
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    async def _answer(self, assignment: Assignment) -> Answer:
        query = assignment.query
        call: Any = None
        try:
            call = pickle.loads(query.call)
            if isinstance(call, PythonCall):
                return await self._answer_python(query.id, call)
            return await self._answer_http(query.id, call, query.call_method, assignment.route)
        except UnderstudyError as error:
            trace = traceback.format_exc()
            return FailedAnswer(query.id, type(error).__name__, str(error), traceback=trace)
        except BaseException as error:
            if asyncio.current_task() in self._cancelled:
                raise
            return _failed(query, error, is_http=isinstance(call, HttpCall))

    async def _answer_python(self, query_id: int, call: PythonCall) -> ValueAnswer:
        args, kwargs = pickle.loads(call.arguments)
        result = await self._invoke(self._method(call.method), args, kwargs, self._pool)
        try:
            return ValueAnswer(query_id, cloudpickle.dumps(result))
        except Exception as error:
            raise UnsupportedResultError(
                f"the result, a {type(result).__name__}, cannot be pickled: {error}"
            ) from error

    async def _answer_http(self, query_id: int, call: HttpCall, method: str, route: str) -> Answer:
        from starlette.exceptions import HTTPException  # noqa: PLC0415  # only for HTTP

        from understudy.actors import responses  # noqa: PLC0415

        request = responses.make_request(call, route)
        function = self._method(method)
        args = (request,) if _takes_argument(function) else ()
        try:
            result = await self._invoke(function, args, {}, self._pool)
        except HTTPException as error:
            return responses.from_http_exception(query_id, error)
        return await responses.make_answer(query_id, result, request)

    def _method(self, name: str) -> Any:
        if name in {"", "__call__"}:
            if callable(self._callable):
                return self._callable
            name = "__call__"
        method = None if name.startswith("_") else getattr(self._callable, name, None)
        if not callable(method):
            public = [n for n in dir(self._callable) if not n.startswith("_")]
            raise InvalidRequestError(
                f"the deployment has no method {name!r}; it has: {', '.join(public) or 'none'}"
            )
        return method


class _Lost:
    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> Any:
        return _raise_lost, (self._text,)


def _raise_lost(text: str) -> None:
    raise DeployFailedError(text)


def lost_code(text: str) -> bytes:
    """Return what stands for code that is lost: to load it raises DeployFailedError(``text``)."""
    return pickle.dumps(_Lost(text))


def _outcome_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Call, and return the exception: asyncio's futures refuse StopIteration, and hang."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error


def _failed(query: Query, error: BaseException, *, is_http: bool) -> FailedAnswer:
    failure = Failure.of(error)
    _print(f"request {query.request_id}:\n{failure.traceback}")
    kind = "UserCodeError"
    if is_http:
        return FailedAnswer(query.id, kind, "the deployment raised an exception")
    return FailedAnswer(
        query.id, kind, failure.text, exception=failure.exception, traceback=failure.traceback
    )


def _print(text: str) -> None:
    """Write to the replica's log, if it takes it: the disk may be full, user code closes files."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr)  # noqa: T201


def _is_async(function: Any) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    if inspect.isfunction(function) or inspect.ismethod(function):
        return False
    call = getattr(type(function), "__call__", None)  # noqa: B004  # an instance's may be async
    return inspect.iscoroutinefunction(call)


def _takes_argument(function: Any) -> bool:
    try:
        return len(inspect.signature(function).parameters) > 0
    except (TypeError, ValueError):  # some callables in C have no signature
        return True
