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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from greenroom.actors.messages.queries import (
    BINARY,
    Answer,
    FailedAnswer,
    HttpCall,
    Input,
    PythonCall,
    Query,
    StreamEnded,
    ValueAnswer,
    content_of,
)
from greenroom.actors.replica import (
    context as held_models,
)
from greenroom.actors.replica import (
    context as user_context,
)
from greenroom.actors.replica import (
    logging as user_logging,
)
from greenroom.actors.replica.callables import Manners, http_methods, is_async, users_traceback
from greenroom.actors.replica.reply import Reply
from greenroom.actors.runtime.logs import one_record
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import (
    PASSED_ON,
    GreenroomError,
    InvalidRequestError,
    UnsupportedResultError,
    UnusableCodeError,
)
from greenroom.core.routing.tickets import SOCKET

if TYPE_CHECKING:
    from greenroom.actors.replica.asgi import AsgiHost
    from greenroom.actors.replica.reply import Reply


# The event loop that user code runs on, in a thread of its own beside the message loop's.

# The message thread waits for the interpreter lock at each of its twenty or so system calls per
# message, and asks for it only after a switch interval in which nobody let go of it. User code that
# lets go of it for a moment more often than that, say with a stat() per millisecond, starves it:
# seen, with 1 ms, control messages 4 s late; with 20 us, below 20 ms. Shorter costs computing
# threads a third of their speed.
SWITCH_INTERVAL_S = 0.00002
PR_SET_TIMERSLACK = 29  # prctl(2); without it, timed waits are 50 us late
END_TIMEOUT_S = 1.0  # for cancelled tasks to end; those that will not are dropped


class UserLoop:
    """An event loop and its thread. The process ends when user code closes the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="user-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread; whatever runs on the loop is cancelled. For a process that lives on."""
        self._is_over = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not (self._is_over or self.loop.is_closed()):
            self._run_until(None)
        if not self._is_over:
            os._exit(1)  # closed by user code: nothing can be answered any more
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self._run_until(asyncio.wait(tasks, timeout=END_TIMEOUT_S))
        self._run_until(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run_until(self, end: Coroutine[Any, Any, Any] | None) -> None:
        # A task of the user's own may raise SystemExit through the loop, or stop it.
        try:
            if end is None:
                self.loop.run_forever()
            else:
                self.loop.run_until_complete(end)
        except BaseException:
            _print(traceback.format_exc())


def give_way_to_messages() -> None:
    """Have this thread, the message loop's, get the interpreter soon whatever user code does."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _print(text: str) -> None:
    """Write to the replica's log, if it takes it: the disk may be full, user code closes files."""
    with contextlib.suppress(OSError, ValueError):
        print(one_record(text), file=sys.stderr)  # noqa: T201


# What user code returns or yields to callers of handles: its way into bytes, whole or in parts.
#
# A value that a generator yields is pickled by itself and sent in parts, the last of which tells
# that it is complete; :mod:`.value_streams` is the other end.

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def dumps(value: Any, did: str) -> bytes:
    """Pickle a value; UnsupportedResultError, with what the code ``did``, when it cannot be."""
    try:
        if _is_plain(value):
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # a tenth of cloudpickle's time
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:  # the user's types may refuse in any way
        if isinstance(value, AsyncIterator) or inspect.isgenerator(value):
            text = f"it {did} a generator; call it with handle.options(stream=True)"
        else:
            text = f"it {did} a {type(value).__name__}, which cannot be pickled: {error}"
        raise UnsupportedResultError(text) from error
    return pickled


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return _PLAIN.issuperset(map(type, value))
    if kind is dict:
        return _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))
    return kind in _PLAIN


async def give_values(reply: Reply, values: AsyncIterator[Any]) -> None:
    """Send what a generator yields, one by one, as fast as the caller takes it."""
    has_begun = False
    try:
        async for value in values:
            pickled = dumps(value, "yielded")  # before it begins: a failure may come whole
            if not has_begun:
                reply.begin(200, ())
                has_begun = True
            await reply.send(pickled, BINARY)
    finally:
        if hasattr(values, "aclose"):
            await values.aclose()
    if not has_begun:
        reply.begin(200, ())
    reply.answer(StreamEnded(reply.assignment.query.id, 200))


ASGI_APP = "__greenroom_asgi_app__"  # the attribute of a class whose requests an app answers
MAX_THREADS = 32
NO_KWARGS: dict[str, Any] = {}
_NO_SOCKETS = (
    "this takes no WebSockets: they are for ASGI apps with such routes, deployed by serve.ingress"
)


def import_starlette() -> None:
    """Import what user code reaches as starlette.requests after ``import starlette`` alone."""
    import starlette.requests  # noqa: PLC0415  # 2.5 MB and 50 ms that not every replica needs
    import starlette.responses  # noqa: F401, PLC0415


class _RefusedError(InvalidRequestError):
    """The query asks for what there is not; no user code has run for it."""


class Failure(NamedTuple):
    """An exception of user code, in a form that travels."""

    text: str  # type and message
    traceback: str
    exception: bytes | None  # cloudpickled, where it can be, and where it is an Exception
    lasts: bool = False  # whether it is of a kind that another try does not mend

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe ``error``. What is no Exception, as SystemExit, must not end who only asked."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = users_traceback(error)
        pickled = None
        if isinstance(error, Exception):
            try:
                pickled = cloudpickle.dumps(error)
                pickle.loads(pickled)  # many exceptions pickle and then cannot be made again
            except Exception:  # any user type may fail in any way; the text goes without it
                pickled = None
        return cls(text, trace, pickled, isinstance(error, UnusableCodeError))


class _Running(NamedTuple):
    task: asyncio.Task[None]
    reply: Reply


class Stuck(NamedTuple):
    """How sync calls are stuck; zeros where they are not."""

    busy_s: float = 0.0  # all threads are taken, calls wait, and none has ended for so long
    waiting: int = 0
    unwanted_s: float = 0.0  # so long all that may run is what nobody waits for any more


class _Threads:
    """What the threads of sync calls do; on user code's loop, but for :meth:`ended`, :meth:`stuck`.

    A call that has begun cannot be ended. One that its caller has given up holds its thread, and
    its slot, until it returns.
    """

    def __init__(self) -> None:
        self.taken = 0  # calls that run, or wait for a thread
        self.unwanted = 0  # of those that run
        self._ended_at = self._full_at = self._abandoned_at = time.monotonic()

    def began(self) -> None:
        self.taken += 1
        if self.taken == MAX_THREADS + 1:
            self._full_at = time.monotonic()

    def ended(self, _call: object) -> None:
        self._ended_at = time.monotonic()

    def abandoned(self) -> None:
        self.unwanted += 1
        self._abandoned_at = time.monotonic()

    def stuck(self, slots: int, now: float) -> Stuck:
        waiting = max(self.taken - MAX_THREADS, 0)
        is_unwanted = self.unwanted >= min(slots, MAX_THREADS)
        return Stuck(
            busy_s=now - max(self._ended_at, self._full_at) if waiting else 0.0,
            waiting=waiting,
            unwanted_s=now - max(self._ended_at, self._abandoned_at) if is_unwanted else 0.0,
        )


class UserCode:
    """Loads and runs user code on ``loop``, from :meth:`start` on.

    What the controller asks for may be called from any thread, and what comes of it is handed to
    ``post``, which takes a callback to the message loop. Queries are run, cancelled and answered on
    ``loop`` itself.
    """

    loop: asyncio.AbstractEventLoop
    allow_method_header = True  # as the settings say; set by the replica's main thread

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        # It starts threads only when none is idle, so never more than the calls that were let in.
        self._pool = ThreadPoolExecutor(MAX_THREADS, "user")
        self._health_pool = ThreadPoolExecutor(1, "health")
        self._threads = _Threads()
        self._running: dict[Any, _Running] = {}
        self._cancelled: set[Any] = set()  # tasks, cancelled by us and not by user code
        self._callable: Any = None
        self._asgi: AsgiHost | None = None
        self._http_methods: frozenset[str] = frozenset()
        self._user_loop = UserLoop()
        self.loop = self._user_loop.loop
        self._manners = Manners()
        self._responses: Any = None  # the module, which imports Starlette: only for HTTP
        self._changing = asyncio.Lock()  # load, reconfigure and close come one after the other

    @property
    def servable_object(self) -> Any:
        """What user code has made of itself; None before."""
        return self._callable

    def start(self) -> None:
        """Start the loop's thread."""
        self._user_loop.start()

    def end(self) -> None:
        """End the threads, for a process that lives on; what runs is cancelled."""
        self.loop.call_soon_threadsafe(self._cancel_all)
        self._user_loop.end()
        for pool in (self._pool, self._health_pool):
            pool.shutdown(wait=False)

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
        elif is_async(check):
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

    def run(self, reply: Reply) -> None:
        """Run a query."""
        serve = self._serve_logged if user_logging.logs_queries() else self._serve
        task = self.loop.create_task(serve(reply))
        self._running[reply.key] = _Running(task, reply)
        task.add_done_callback(partial(self._ended, reply))

    async def _serve(self, reply: Reply) -> None:
        answer = await self._answer(reply)
        if answer is not None:
            reply.answer(answer)
        del self._running[reply.key]
        reply.end()  # here, which is one pass of the loop earlier than in _ended

    async def _serve_logged(self, reply: Reply) -> None:
        began_at = time.perf_counter()
        try:
            await self._serve(reply)
        finally:
            took_s = time.perf_counter() - began_at
            user_logging.log_query(reply.assignment.query, reply.status, took_s)

    def _ended(self, reply: Reply, task: asyncio.Task[None]) -> None:
        """Tell the end of a task that was cancelled, perhaps before its code began."""
        self._cancelled.discard(task)
        if self._running.pop(reply.key, None) is not None:
            reply.end()

    def cancel(self, key: Any) -> None:
        """Cancel a query: async code gets CancelledError, sync code runs on unheard.

        So are the calls that it has made: a thread that waits for one is free at once.
        """
        running = self._running.get(key)
        if running is not None and running.task not in self._cancelled:
            self._cancelled.add(running.task)
            running.task.cancel()
            running.reply.cancel_calls()

    def _cancel_all(self) -> None:
        for key in list(self._running):
            self.cancel(key)

    def _spawn(self, coroutine: Any, on_done: Callable[[Failure | None], None]) -> None:
        async def guarded() -> None:
            failure = None
            try:
                await coroutine
            except BaseException as error:  # sys.exit() in a constructor must not end the loop
                failure = Failure.of(error)
            self._post(lambda: on_done(failure))

        asyncio.run_coroutine_threadsafe(guarded(), self.loop)

    async def _load(self, code: bytes, user_config: Any) -> None:
        async with self._changing:
            await self._make(code)
            if user_config is not None:
                await self._call_reconfigure(user_config)

    async def _make(self, code: bytes) -> None:
        if b"starlette" in code:
            import_starlette()
        try:
            target, args, kwargs = cloudpickle.loads(code)
        except UnusableCodeError:
            raise  # see lost_code
        except Exception as error:
            raise UnusableCodeError(
                f"the deployment's code cannot be unpickled on host {read_settings().host_name!r}: "
                f"{type(error).__name__}: {error}; is everything that it imports installed there?"
            ) from error
        if inspect.isclass(target):
            self._callable = await self._construct(target, args, kwargs)
        else:
            self._callable = target
        self._http_methods = http_methods(type(self._callable))
        user_context.constructed(self._callable)
        source = getattr(self._callable, ASGI_APP, None)
        if source is not None:
            from greenroom.actors.replica.asgi import AsgiHost  # noqa: PLC0415  # only for who has one

            self._asgi = AsgiHost(source.app())
            await self._asgi.start()

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
            raise UnusableCodeError(
                "user_config is set, but the deployment has no reconfigure(user_config) method"
            )
        await self._invoke("reconfigure", method, (user_config,))

    async def _close(self) -> None:
        async with self._changing:
            if self._asgi is not None:
                await self._asgi.stop()
            await held_models.close()
            finalizer = getattr(type(self._callable), "__del__", None)
            if finalizer is not None:
                await self._invoke("__del__", finalizer, (self._callable,))

    async def _invoke(self, name: str, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        manner = self._manners.of(name, function)
        if manner.is_async:
            return await function(*args, **kwargs)
        if manner.makes_generator:
            return function(*args, **kwargs)
        return await self._run_in_thread(function, args, kwargs)

    def stuck(self, slots: int, now: float) -> Stuck:
        """Return how sync calls are stuck, where ``slots`` may run at once; from any thread."""
        return self._threads.stuck(slots, now)

    async def _run_in_thread(self, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        call = self._pool.submit(copy_context().run, _outcome_of, function, args, kwargs)
        call.add_done_callback(self._threads.ended)
        future = asyncio.wrap_future(call, loop=self.loop)
        self._threads.began()
        try:
            result, error = await asyncio.shield(future)
        except asyncio.CancelledError:
            if not call.cancel():  # it runs; its answer is no longer wanted
                self._threads.abandoned()
                try:
                    await future
                finally:
                    self._threads.unwanted -= 1
            raise
        finally:
            self._threads.taken -= 1
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    async def _answer(self, reply: Reply) -> Answer | None:
        """Return the answer; None when it was given already."""
        assignment = reply.assignment
        user_context.running.set(reply)
        query = assignment.query
        call: Any = None
        try:
            call = pickle.loads(content_of(query.call))
            if isinstance(call, PythonCall):
                return await self._answer_python(reply, call)
            call = HttpCall(*call)
            return await self._answer_http(reply, call)
        except _RefusedError as error:
            return FailedAnswer(query.id, InvalidRequestError.__name__, str(error))
        except GreenroomError as error:
            if isinstance(call, HttpCall) and not isinstance(error, PASSED_ON):
                return _failed(query, error, is_http=True)
            trace = users_traceback(error)
            if isinstance(error, UnsupportedResultError):
                user_logging.log_failure(query, error)
            return FailedAnswer(query.id, type(error).__name__, str(error), traceback=trace)
        except BaseException as error:
            # Closed: this is collected, with the GeneratorExit of one that would not be cancelled.
            if self.loop.is_closed() or asyncio.current_task() in self._cancelled:
                raise
            return _failed(query, error, is_http=isinstance(call, HttpCall))

    async def _answer_python(self, reply: Reply, call: PythonCall) -> Answer | None:
        args, kwargs = _arguments(call)
        result = await self._invoke(call.method, self._method(call.method), args, kwargs)
        if not call.stream:
            return ValueAnswer(reply.assignment.query.id, dumps(result, "returned"))
        if hasattr(result, "__next__"):
            result = self._iterate(result)
        if not hasattr(result, "__aiter__"):
            raise UnsupportedResultError(
                f"{call.method} returned a {type(result).__name__}; a call with stream=True is for "
                "generators"
            )
        await give_values(reply, result)
        return None

    async def _answer_http(self, reply: Reply, call: HttpCall) -> Answer | None:
        responses = self._responses or self._import_responses()
        method = reply.assignment.query.call_method
        if reply.assignment.query.follows == SOCKET:
            if self._asgi is None or method:
                raise _RefusedError(_NO_SOCKETS)
            await self._asgi.converse(reply, call)
            return None
        if method:
            self._check_method_header(method)
        request = responses.make_request(call, reply)
        if self._asgi is not None:
            await self._asgi.answer(reply, request)
            return None
        function = self._method(method, is_http=True)
        args = (request,) if self._manners.of(method, function).takes_argument else ()
        try:
            result = await self._invoke(method, function, args)
        except responses.HTTPException as error:
            refused: Answer = responses.from_http_exception(reply.assignment.query.id, error)
            return refused
        if inspect.isgenerator(result):
            result = self._iterate(result)
        answer: Answer | None = await responses.give_answer(reply, result, request)
        return answer

    def _import_responses(self) -> Any:
        from greenroom.actors.replica import responses  # noqa: PLC0415

        self._responses = responses
        return responses

    async def _iterate(self, iterator: Iterator[Any]) -> AsyncIterator[Any]:
        """Run a generator on the threads of sync code, step by step."""
        end = object()
        try:
            while (item := await self._run_in_thread(next, (iterator, end))) is not end:
                yield item
        finally:
            if hasattr(iterator, "close"):
                await self._run_in_thread(iterator.close, ())

    def _check_method_header(self, name: str) -> None:
        """Refuse what HTTP requests may not call; clients are told nothing of what there is."""
        if self._asgi is not None:
            text = (
                "an ASGI app answers this deployment's requests, and the header "
                "X-Serve-Call-Method would go past it; leave the header out"
            )
        elif not self.allow_method_header:
            text = "this deployment takes no header X-Serve-Call-Method; leave it out"
        elif name == "__call__" or name in self._http_methods:
            return
        else:
            text = (
                f"header X-Serve-Call-Method: {name[:100]!r} is no method that HTTP requests may "
                "call here"
            )
        raise _RefusedError(text)

    def _method(self, name: str, *, is_http: bool = False) -> Any:
        if name in {"", "__call__"}:
            if callable(self._callable):
                return self._callable
            name = "__call__"
        method = None if name.startswith("_") else getattr(self._callable, name, None)
        if callable(method):
            return method
        public = self._public_methods()
        if not public:  # no mistake of who asks
            raise GreenroomError("the deployment has no method that can be called")
        if is_http:
            raise _RefusedError(
                f"the deployment has no {name}; name one of its methods in the header "
                "X-Serve-Call-Method"
            )
        raise _RefusedError(f"the deployment has no method {name!r}; it has: {', '.join(public)}")

    def _public_methods(self) -> list[str]:
        kind = type(self._callable)
        methods = [each for each in dir(kind) if callable(getattr(kind, each, None))]
        return [each for each in methods if each == "__call__" or not each.startswith("_")]


class _Lost:
    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> Any:
        return _raise_lost, (self._text,)


def _raise_lost(text: str) -> None:
    raise UnusableCodeError(text)


def lost_code(text: str) -> bytes:
    """Return what stands for code that is lost: to load it raises UnusableCodeError(``text``)."""
    return pickle.dumps(_Lost(text))


def _arguments(call: PythonCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = pickle.loads(call.arguments)
    if not call.inputs:
        return args, kwargs

    def resolved(value: Any) -> Any:
        return pickle.loads(call.inputs[value.place]) if type(value) is Input else value

    return tuple(map(resolved, args)), {name: resolved(value) for name, value in kwargs.items()}


def _outcome_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Call, and return the exception: asyncio's futures refuse StopIteration, and hang."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error


def _failed(query: Query, error: BaseException, *, is_http: bool) -> FailedAnswer:
    failure = Failure.of(error)
    user_logging.log_failure(query, error)
    kind = "UserCodeError"
    if is_http:
        return FailedAnswer(query.id, kind, "the deployment raised an exception")
    return FailedAnswer(
        query.id, kind, failure.text, exception=failure.exception, traceback=failure.traceback
    )
