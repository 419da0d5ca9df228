"""One copy of the user's code, on a thread and event loop of its own.

Theory of operation. The actor's message loop must answer within 100 ms whatever user code does, so
user code never runs on it. Async code runs as tasks on the event loop of :class:`UserLoop`, sync
code on at most min(32, max_ongoing_requests) threads, or between the turns of the loop (all in
threads.py), ``check_health`` on a thread of its own. A class without async methods and with
``max_ongoing_requests=1`` lives on a single thread, its constructor and ``check_health`` included.
Whatever user code raises, SystemExit and CancelledError too, ends its own call and nothing else.

The life of a query: :meth:`UserCode.run` makes a task of it, which reads the call, finds the method
of the :class:`Servable`, calls it on the loop or on a thread, and gives the result to the
:class:`Reply`: a value (:func:`dumps`), a generator's values
(:meth:`Reply.give`), an HTTP response (responses.py, asgi.py), or a FailedAnswer. A running sync
call cannot be stopped. Cancelling it only drops its answer, and it holds its slot until it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import pickle
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import cloudpickle

from greenroom.actors.caller.streams import NobodyListensError, StreamFailedError
from greenroom.actors.messages.protobuf import portable
from greenroom.actors.messages.queries import (
    BINARY,
    END,
    Answer,
    FailedAnswer,
    HttpCall,
    PythonCall,
    Query,
    ValueAnswer,
    arguments_of,
    call_of,
)
from greenroom.actors.replica import context as user_context, logging as user_logging
from greenroom.actors.replica.context import Headers, Reply
from greenroom.actors.replica.modules import users_traceback
from greenroom.actors.replica.pickling import dumps as by_value
from greenroom.actors.replica.servable import RefusedError, Servable, is_async, is_sync
from greenroom.actors.replica.threads import MAX_THREADS, NO_KWARGS, Stuck, UserLoop, outcome_of
from greenroom.actors.runtime import tracing
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.config import SessionAffinity
from greenroom.core.errors import (
    PASSED_ON,
    GreenroomError,
    InvalidRequestError,
    NotBegunError,
    UnsupportedResultError,
    UnusableCodeError,
)
from greenroom.core.routing.sessions import new_cookie
from greenroom.core.routing.tickets import SOCKET

if TYPE_CHECKING:
    from greenroom.actors.caller.streams import Parts
    from greenroom.actors.runtime.tracing import Span, Tracing

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_NO_SOCKETS = (
    "this takes no WebSockets: they are for ASGI apps with such routes, deployed by serve.ingress"
)


def import_starlette() -> None:
    """Import what user code reaches as starlette.requests after ``import starlette`` alone."""
    import starlette.requests  # noqa: PLC0415  # replicas have it; 50 ms for local tests
    import starlette.responses  # noqa: F401, PLC0415


def named_target(module: str, qualname: str) -> Any:
    """Import the class or function of a deployment, which its module has by this name."""
    found = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return getattr(found, "func_or_class", found)


class Failure(NamedTuple):
    """An exception of user code, in a form that travels."""

    text: str  # type and message
    traceback: str
    exception: bytes | None  # cloudpickled, where it can be, and where it is an Exception
    lasts: bool = False  # whether another try would fail in the same way

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe ``error``. Only an Exception is pickled: SystemExit would end the asker."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = users_traceback(error)
        pickled = None
        if isinstance(error, Exception):
            try:
                pickled = by_value(error)
                pickle.loads(pickled)  # many exceptions pickle and then cannot be made again
            except Exception:  # any user type may fail in any way; the text goes without it
                pickled = None
        return cls(text, trace, pickled, isinstance(error, UnusableCodeError))


P = ParamSpec("P")
Result = TypeVar("Result")
MAX_STATS = 10  # of a replica, for the policy of autoscaling
MAX_NAME = 60  # characters


def _from_any_thread(
    method: Callable[Concatenate[UserCode, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[UserCode, P], Future[Result | Failure]]:
    """Run a coroutine on user code's loop, whoever calls; what it raises comes as a Failure."""

    @functools.wraps(method)
    def call(self: UserCode, /, *args: P.args, **kwargs: P.kwargs) -> Future[Result | Failure]:
        async def guarded() -> Result | Failure:
            try:
                return await method(self, *args, **kwargs)
            except BaseException as error:  # sys.exit() in a constructor must not end the loop
                return Failure.of(error)

        outcome: Future[Result | Failure] = Future()

        def begin() -> None:
            if not outcome.cancelled():
                task = self.loop.create_task(guarded())
                task.add_done_callback(end)
                # Which also holds the task: the loop does not.
                outcome.add_done_callback(partial(pass_on, task))

        def pass_on(task: asyncio.Task[Any], outcome: Future[Any]) -> None:
            if outcome.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self.loop.call_soon_threadsafe(task.cancel)

        def end(task: asyncio.Task[Result | Failure]) -> None:
            if task.cancelled():  # before it began, by user code that cancels all tasks
                error = asyncio.CancelledError("user code cancelled it before it began")
                result: Result | Failure = Failure.of(error)
            else:
                result = task.result()
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                outcome.set_result(result)

        self.loop.call_soon_threadsafe(begin)
        return outcome

    return call


class UserCode:
    """Loads and runs user code on ``loop``, from :meth:`start` on.

    What the controller asks for may be called from any thread; of what user code raises there comes
    a Failure. Queries are run, cancelled and answered on ``loop`` itself.
    """

    def __init__(self) -> None:
        self._user_loop = UserLoop()
        self.loop = self._user_loop.loop
        self._threads = self._user_loop.threads
        self.servable = Servable(self._threads)
        self._health_pool = ThreadPoolExecutor(1, "health")
        self._changing = asyncio.Lock()  # load, reconfigure and close come one after the other
        self._affinity: SessionAffinity | None = None
        self._served_by_header = False
        self._responses: Any = None  # the module, which imports Starlette: only for HTTP
        self._running: dict[asyncio.Task[None], Reply] = {}

    def start(self) -> None:
        """Start the loop's thread."""
        self._user_loop.start()

    def end(self) -> None:
        """End the threads, for a process that lives on; what runs is cancelled."""
        self.loop.call_soon_threadsafe(self._cancel_all)
        self._user_loop.end()
        self._health_pool.shutdown(wait=False)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take newer settings; callable from any thread. Another release's may lack some."""
        affinity = config.get("session_affinity")
        self._affinity = None if affinity is None else SessionAffinity.read(affinity)
        self._served_by_header = config.get("served_by_header", False)
        self.servable.http_call_methods = config.get("http_call_methods", ())
        self._threads.size = min(MAX_THREADS, config["max_ongoing_requests"])

    # --- What the controller asks for ---------------------------------------------------------

    @_from_any_thread
    async def load(self, code: bytes, user_config: Any) -> None:
        """Unpickle the code, construct its instance, call reconfigure, then warmup."""
        async with self._changing:
            target, args, kwargs = _unpickled(code)
            self._threads.takes_short_calls = self._user_loop.has_thread and is_sync(target)
            await self.servable.construct(target, args, kwargs)
            if user_config is not None:
                await self.servable.reconfigure(user_config)
            await self.servable.warm_up()

    @_from_any_thread
    async def reconfigure(self, user_config: Any) -> None:
        """Call the instance's reconfigure with the new user_config."""
        async with self._changing:
            if self.servable.instance is not None:  # else it is loaded with the newest
                await self.servable.reconfigure(user_config)

    @_from_any_thread
    async def close(self) -> None:
        """End the app's lifespan, unload models, call the instance's ``__del__``."""
        async with self._changing:
            await self.servable.close()

    def check_health(self) -> Future[Failure | None]:
        """Call the instance's check_health, where it has one."""
        check, error = self._hook("check_health")
        if check is None:
            return _settled(None if error is None else Failure.of(error))
        if is_async(check) or self.servable.has_own_thread:
            return self._check(check)
        # Not by way of the event loop, which user code may be blocking.
        return self._health_pool.submit(_failure_in, check)

    @_from_any_thread
    async def _check(self, check: Any) -> None:
        if is_async(check):
            await check()
        elif not self._threads.taken:  # between calls: one may take longer than a check may
            await self._threads.run(check, ())

    def autoscaling_stats(self) -> Future[dict[str, float] | Failure] | None:
        """Call the instance's record_autoscaling_stats; None where it has none."""
        method, error = self._hook("record_autoscaling_stats")
        if error is not None:
            return _settled(Failure.of(error))
        return None if method is None else self._record(method)

    def _hook(self, name: str) -> tuple[Any, BaseException | None]:
        """Return a hook, None for none; or what a ``__getattr__`` or property of it raises."""
        return outcome_of(self.servable.hook, (name,), NO_KWARGS)

    @_from_any_thread
    async def _record(self, method: Any) -> dict[str, float]:
        return _numbers(await self.servable.run("record_autoscaling_stats", method))

    def stuck(self, slots: int, now: float) -> Stuck:
        """Return how sync calls are stuck, where ``slots`` may run at once; from any thread."""
        return self._threads.stuck(slots, now)

    # --- Queries ------------------------------------------------------------------------------

    def run(self, reply: Reply) -> None:
        """Run a query."""
        serve = self._serve_logged if user_logging.logs_queries() else self._serve
        if tracing.active is not None:
            serve = functools.partial(_traced, serve)
        reply.task = task = self.loop.create_task(serve(reply))
        task.add_done_callback(self._ended)  # user code may cancel it before it begins
        self._running[task] = reply

    def cancel(self, reply: Reply) -> None:
        """Cancel a query: async code gets CancelledError, the answer of sync code is dropped.

        The calls that it has made are cancelled too, so a thread that waits for one is free at
        once.
        """
        if reply.task is not None and not reply.is_cancelled:
            reply.task.cancel()
            reply.cancel_calls()
            if reply.sender is not None:
                reply.sender.close()  # code that goes on would wait for room for ever

    def _cancel_all(self) -> None:
        for reply in list(self._running.values()):
            self.cancel(reply)

    async def _serve(self, reply: Reply) -> None:
        task = reply.task
        assert task is not None, "set by run()"
        task.remove_done_callback(self._ended)  # it would cost a pass of the loop
        try:
            answer = await self._answer(reply)
            if answer is not None:
                reply.answer(answer)
        except GeneratorExit:  # the loop is closed, and this is collected
            raise
        except BaseException:
            self._ended(task)
            raise
        self._ended(task)

    async def _serve_logged(self, reply: Reply) -> None:
        began_at = time.perf_counter()
        try:
            await self._serve(reply)
        finally:
            took_s = time.perf_counter() - began_at
            user_logging.log_query(reply.assignment.query, reply.status, took_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        reply = self._running.pop(task)
        reply.task = None
        reply.end()

    async def _answer(self, reply: Reply) -> Answer | None:
        """Return the answer; None when it was given already."""
        user_context.running.set(reply)
        query = reply.assignment.query
        call: Any = None
        try:
            call = call_of(query)
            is_python = isinstance(call, PythonCall)
            if tracing.active is not None:
                reply.span = _span_of(tracing.active, reply, call)
            if is_python:
                return await self._answer_python(reply, call)
            return await self._answer_http(reply, call)
        except RefusedError as error:
            return FailedAnswer(query.id, InvalidRequestError.__name__, str(error))
        except GreenroomError as error:
            return _failed_by_us(reply, call, error)
        except BaseException as error:
            # Closed: this is collected, with the GeneratorExit of one that would not be cancelled.
            if self.loop.is_closed() or reply.is_cancelled:
                if isinstance(error, NobodyListensError):
                    return None  # it went on though it was cancelled, and learns so by this
                raise
            if reply.span is not None:
                reply.span.failed(error)
            return _failed(query, error, is_http=isinstance(call, HttpCall))

    async def _answer_python(self, reply: Reply, call: PythonCall) -> Answer | None:
        try:
            args, kwargs = arguments_of(call)
        except ModuleNotFoundError as error:
            raise RefusedError(
                f"the arguments of a call to {call.method} have objects of a module that the "
                f"deployment lacks ({error}); import it in the application's modules, or add it to "
                "the runtime_env's py_modules"
            ) from error
        if reply.upload is not None:
            args = (*args, _values_of(reply.upload))
        function = self.servable.method(call.method)
        manner = self.servable.manner(call.method, function)
        result = await self.servable.call(manner, function, args, kwargs)
        if not call.stream:
            return ValueAnswer(reply.assignment.query.id, dumps(result, "returned"))
        if hasattr(result, "__next__"):
            result = self._threads.iterate(result)
        if not hasattr(result, "__aiter__"):
            raise UnsupportedResultError(
                f"{call.method} returned a {type(result).__name__}; a call with stream=True is for "
                "generators"
            )
        await reply.give(result, lambda value: ((), dumps(value, "yielded")), BINARY)
        return None

    async def _answer_http(self, reply: Reply, call: HttpCall) -> Answer | None:
        servable, method = self.servable, reply.assignment.query.call_method
        if self._affinity is not None or self._served_by_header:
            reply.extra_headers = self._extra_headers(reply, call)
        if reply.assignment.query.follows == SOCKET:
            if servable.asgi is None or method:
                raise RefusedError(_NO_SOCKETS)
            await servable.asgi.converse(reply, call)
            return None
        if method:
            servable.check_method_header(method)
        if servable.asgi is not None:
            await servable.asgi.answer(reply, call)
            return None
        responses = self._responses or self._http()
        request = responses.make_request(call, reply)
        function = servable.method(method, is_http=True)
        manner = servable.manner(method, function)
        args = (request,) if manner.takes_argument else ()
        try:
            result = await servable.call(manner, function, args)
        except responses.HTTPException as error:
            result = responses.response_for(error)
        if isinstance(result, GeneratorType):
            result = self._threads.iterate(result)
        answer: Answer | None = await responses.give_answer(reply, result, request)
        return answer

    def _extra_headers(self, reply: Reply, call: HttpCall) -> Headers:
        replica, headers = user_context.replica_context(), []
        tag = "" if replica is None else replica.replica_tag
        if self._affinity is not None:
            cookie = new_cookie(self._affinity, call.headers, reply.assignment.route, tag)
            headers += [] if cookie is None else [(b"set-cookie", cookie)]
        if self._served_by_header:
            headers.append((b"x-served-by", tag.encode()))
        return tuple(headers)

    def _http(self) -> Any:
        from greenroom.actors.replica import responses  # noqa: PLC0415

        self._responses = responses
        return responses


# --- Traces -----------------------------------------------------------------------------------


async def _traced(serve: Callable[[Reply], Coroutine[Any, Any, None]], reply: Reply) -> None:
    """Serve a query, and end its span, if it has come to have one."""
    try:
        await serve(reply)
    finally:
        if reply.span is not None:
            reply.span.ended(reply.status)


def _span_of(tracer: Tracing, reply: Reply, call: PythonCall | HttpCall) -> Span:
    """Begin a query's span; what its task does from now on belongs to it."""
    assignment, replica = reply.assignment, user_context.replica_context()
    query, carried = assignment.query, call.trace
    attributes = {
        "greenroom.request_id": query.request_id,
        "greenroom.endpoint": assignment.endpoint,
        "greenroom.replica": replica.replica_tag if replica is not None else "",
    }
    if isinstance(call, PythonCall):
        return tracer.query(f"{assignment.endpoint}.{call.method}", carried, attributes)
    if carried is None:  # the front does not trace, but its client may
        head = {name: value.decode("latin-1") for name, value in call.headers}
        carried = (head.get(b"traceparent", ""), head.get(b"tracestate", ""), 0.0)
    attributes |= {"http.request.method": query.http_method, "http.route": assignment.route}
    return tracer.query(f"{query.http_method} {assignment.route}", carried, attributes)


# --- What a call is made of, and what comes of it ---------------------------------------------


async def _values_of(upload: Parts) -> AsyncIterator[Any]:
    """Yield what a caller streams, value by value; StreamFailedError where not all of it came."""
    while (part := await upload.next_message()) is not None:
        if part.ends == END:
            return
        yield pickle.loads(part.data)
    raise StreamFailedError("the call has ended before all of its values were here")


def dumps(value: Any, did: str) -> bytes:
    """Pickle a value; UnsupportedResultError, with what the code ``did``, when it cannot be."""
    try:
        if _is_plain(value):
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # a tenth of cloudpickle's time
        return by_value(portable(value))
    except Exception as error:  # the user's types may refuse in any way
        if isinstance(value, AsyncIterator) or inspect.isgenerator(value):
            text = f"it {did} a generator; call it with handle.options(stream=True)"
        else:
            text = f"it {did} a {type(value).__name__}, which cannot be pickled: {error}"
        raise UnsupportedResultError(text) from error


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return _PLAIN.issuperset(map(type, value))
    if kind is dict:
        return _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))
    return kind in _PLAIN


def _failed_by_us(reply: Reply, call: Any, error: GreenroomError) -> Answer | None:
    """Answer with an error of ours; return None where another replica is to answer."""
    query = reply.assignment.query
    if isinstance(error, NotBegunError) and reply.give_back():
        return None
    if isinstance(call, HttpCall) and not isinstance(error, PASSED_ON):
        return _failed(query, error, is_http=True)
    trace = users_traceback(error)
    if isinstance(error, UnsupportedResultError):
        user_logging.log_failure(query, error)
    return FailedAnswer(query.id, type(error).__name__, str(error), traceback=trace)


def _failed(query: Query, error: BaseException, *, is_http: bool) -> FailedAnswer:
    user_logging.log_failure(query, error)
    kind = "UserCodeError"
    if is_http:
        return FailedAnswer(query.id, kind, "the deployment raised an exception")
    text, trace, pickled, _ = Failure.of(error)
    return FailedAnswer(query.id, kind, text, exception=pickled, traceback=trace)


def _settled(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _failure_in(check: Callable[[], Any]) -> Failure | None:
    error = outcome_of(check, (), {})[1]
    return None if error is None else Failure.of(error)


# --- Code that travels ------------------------------------------------------------------------


def _unpickled(code: bytes) -> Any:
    """Return the class or function, and its arguments; UnusableCodeError where it is not here."""
    if b"starlette" in code:
        import_starlette()
    try:
        return cloudpickle.loads(code)
    except UnusableCodeError:
        raise  # see lost_code
    except Exception as error:
        raise UnusableCodeError(
            f"the deployment's code cannot be unpickled on host {read_settings().host_name!r}: "
            f"{type(error).__name__}: {error}; is everything that it imports installed there?"
        ) from error


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


def _numbers(stats: Any) -> dict[str, float]:
    """Return what record_autoscaling_stats returned as plain numbers; TypeError for others."""
    if not isinstance(stats, Mapping) or len(stats) > MAX_STATS:
        raise TypeError(f"expected a dict of at most {MAX_STATS} numbers, not {stats!r:.200}")
    numbers: dict[str, float] = {}
    for name, value in stats.items():
        number = float(value)
        if not (isinstance(name, str) and math.isfinite(number)):
            raise TypeError(f"expected a name and a finite number, not {name!r:.50}: {value!r:.50}")
        numbers[name[:MAX_NAME]] = number
    return numbers
