"""One copy of the user's code, on a thread and event loop of its own.

Theory of operation. The actor's message loop must answer within 100 ms whatever user code does, so
user code never runs on it. Async code runs as tasks on the event loop of :class:`UserLoop`, sync
code on at most min(32, max_ongoing_requests) threads, or between the turns of the loop (all in
threads.py), ``check_health`` on a thread of its own. A class without async methods and with
``max_ongoing_requests=1`` lives on a single thread, its constructor and ``check_health`` included.
Whatever user code raises, SystemExit and CancelledError too, ends its own call and nothing else.

The life of a query: :meth:`UserCode.run` makes a task of it, which reads the call, finds the method
(:meth:`UserCode._method`), calls it on the loop or on a thread (:meth:`UserCode._invoke`), and
gives the result to the :class:`Reply`: a value (:func:`dumps`), a generator's values
(:func:`give_values`), an HTTP response (responses.py, asgi.py), or a FailedAnswer. A running sync
call cannot be stopped. Cancelling it only drops its answer, and it holds its slot until it returns.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import pickle
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cloudpickle

from greenroom.actors.messages.protobuf import portable
from greenroom.actors.messages.queries import (
    BINARY,
    END,
    MORE,
    Answer,
    FailedAnswer,
    HttpCall,
    PythonCall,
    Query,
    StreamEnded,
    ValueAnswer,
    arguments_of,
    call_of,
)
from greenroom.actors.replica import context as user_context, logging as user_logging
from greenroom.actors.replica.callables import (
    Manner,
    Manners,
    http_methods,
    is_async,
    users_traceback,
)
from greenroom.actors.replica.context import Reply
from greenroom.actors.replica.pickling import dumps as by_value
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
    from greenroom.actors.replica.asgi import AsgiHost
    from greenroom.actors.runtime.tracing import Span, Tracing

ASGI_APP = "__greenroom_asgi_app__"  # the attribute of a class whose requests an app answers
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


class _RefusedError(InvalidRequestError):
    """The query asks for something that does not exist; no user code has run for it."""


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


Result = TypeVar("Result")
MAX_STATS = 10  # of a replica, for the policy of autoscaling
MAX_NAME = 60  # characters
NO_REQUEST = HttpCall("GET", "/", b"/", b"", (), b"", "http", "1.1", None, None, "")


class UserCode:
    """Loads and runs user code on ``loop``, from :meth:`start` on.

    What the controller asks for may be called from any thread; of what user code raises there comes
    a Failure. Queries are run, cancelled and answered on ``loop`` itself.
    """

    def __init__(self) -> None:
        # As the settings say; set by the replica's main thread.
        self.http_call_methods: Collection[str] | None = ()
        self.session_affinity: SessionAffinity | None = None
        self.served_by_header = False
        self._user_loop = UserLoop()
        self.loop = self._user_loop.loop
        self._threads = self._user_loop.threads
        self._health_pool = ThreadPoolExecutor(1, "health")
        self._changing = asyncio.Lock()  # load, reconfigure and close come one after the other
        self._callable: Any = None
        self._has_own_thread = False  # where all of a class's code runs
        self._asgi: AsgiHost | None = None
        self._manners = Manners()
        self._http_methods: frozenset[str] = frozenset()
        self._responses: Any = None  # the module, which imports Starlette: only for HTTP
        self._running: dict[Any, tuple[asyncio.Task[None], Reply]] = {}  # by the reply's key
        self._cancelled: dict[Any, Reply] = {}  # by tasks, cancelled by us and not by user code

    @property
    def servable_object(self) -> Any:
        """What user code has made of itself; None before."""
        return self._callable

    @property
    def takes_short_calls(self) -> bool:
        """Return whether the loop's thread may run sync calls: there is no async code, then."""
        return self._threads.takes_short_calls

    def start(self) -> None:
        """Start the loop's thread."""
        self._user_loop.start()

    def end(self) -> None:
        """End the threads, for a process that lives on; what runs is cancelled."""
        self.loop.call_soon_threadsafe(self._cancel_all)
        self._user_loop.end()
        self._health_pool.shutdown(wait=False)

    def set_max_ongoing_requests(self, number: int) -> None:
        """Run as many sync calls at once, up to MAX_THREADS; callable from any thread."""
        self._threads.size = min(MAX_THREADS, number)

    # --- What the controller asks for ---------------------------------------------------------

    def load(self, code: bytes, user_config: Any) -> Future[Failure | None]:
        """Unpickle the code, construct its instance, call reconfigure, then warmup."""
        return self._spawn(self._load(code, user_config))

    def reconfigure(self, user_config: Any) -> Future[Failure | None]:
        """Call the instance's reconfigure with the new user_config."""
        return self._spawn(self._reconfigure(user_config))

    def close(self) -> Future[Failure | None]:
        """End the app's lifespan, unload models, call the instance's ``__del__``."""
        return self._spawn(self._close())

    def check_health(self) -> Future[Failure | None]:
        """Call the instance's check_health, where it has one."""
        check = getattr(self._callable, "check_health", None)
        if check is None or inspect.isclass(self._callable):
            healthy: Future[Failure | None] = Future()
            healthy.set_result(None)
            return healthy
        if is_async(check):
            return self._spawn(_without_result(check()))
        if self._has_own_thread:
            return self._spawn(self._check_on_own_thread(check))
        # Not by way of the event loop, which user code may be blocking.
        return self._health_pool.submit(_failure_in, check)

    def autoscaling_stats(self) -> Future[dict[str, float] | Failure] | None:
        """Call the instance's record_autoscaling_stats; None where it has none."""
        method = getattr(self._callable, "record_autoscaling_stats", None)
        if method is None or inspect.isroutine(self._callable):
            return None

        async def record() -> dict[str, float]:
            return _numbers(await (method() if is_async(method) else self._threads.run(method, ())))

        return self._spawn(record())

    async def _check_on_own_thread(self, check: Any) -> None:
        """Check the health between calls: a call may take longer than a check may."""
        if not self._threads.taken:
            await self._threads.run(check, ())

    def stuck(self, slots: int, now: float) -> Stuck:
        """Return how sync calls are stuck, where ``slots`` may run at once; from any thread."""
        return self._threads.stuck(slots, now)

    def _spawn(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result | Failure]:
        async def guarded() -> Result | Failure:
            try:
                return await coroutine
            except BaseException as error:  # sys.exit() in a constructor must not end the loop
                return Failure.of(error)

        return asyncio.run_coroutine_threadsafe(guarded(), self.loop)

    async def _load(self, code: bytes, user_config: Any) -> None:
        async with self._changing:
            target, args, kwargs = _unpickled(code)
            self._threads.takes_short_calls = self._user_loop.has_thread and _is_sync(target)
            if not inspect.isclass(target):
                self._callable = target
            elif inspect.iscoroutinefunction(target.__init__):
                self._callable = target.__new__(target)
                await self._callable.__init__(*args, **kwargs)
            elif self._threads.size == 1 and _is_sync(target):
                self._has_own_thread = True
                # In a list, because what can be awaited is awaited.
                [self._callable] = await self._threads.run(lambda: [target(*args, **kwargs)], ())
            else:
                self._callable = target(*args, **kwargs)
            self._http_methods = http_methods(type(self._callable))
            user_context.constructed(self._callable)
            source = getattr(self._callable, ASGI_APP, None)
            if source is not None:
                from greenroom.actors.replica.asgi import AsgiHost  # noqa: PLC0415  # as above

                self._asgi = AsgiHost(source.app(type(self._callable)))
                await self._asgi.start()
            if user_config is not None:
                await self._call_reconfigure(user_config)
            await self._warm_up()

    async def _warm_up(self) -> None:
        method = getattr(self._callable, "warmup", None)
        if method is None or inspect.isroutine(self._callable):
            return
        try:
            inspect.signature(method).bind()
        except TypeError as error:
            raise UnusableCodeError(f"warmup() is called without arguments: {error}") from None
        await self._invoke("warmup", method, ())

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
            await user_context.unload_models()
            finalizer = getattr(type(self._callable), "__del__", None)
            if finalizer is not None:
                await self._invoke("__del__", finalizer, (self._callable,))

    # --- Queries ------------------------------------------------------------------------------

    def run(self, reply: Reply) -> None:
        """Run a query."""
        serve = self._serve_logged if user_logging.logs_queries() else self._serve
        if tracing.active is not None:
            serve = partial(_traced, serve)
        task = self.loop.create_task(serve(reply))
        task.add_done_callback(self._task_ended)
        self._running[reply.key] = task, reply

    def cancel(self, key: Any) -> None:
        """Cancel a query: async code gets CancelledError, the answer of sync code is dropped.

        The calls that it has made are cancelled too, so a thread that waits for one is free at
        once.
        """
        running = self._running.get(key)
        if running is not None and running[0] not in self._cancelled:
            task, reply = running
            self._cancelled[task] = reply
            task.cancel()
            reply.cancel_calls()

    def _cancel_all(self) -> None:
        for key in list(self._running):
            self.cancel(key)

    async def _serve(self, reply: Reply) -> None:
        answer = await self._answer(reply)
        if answer is not None:
            reply.answer(answer)
        task, _ = self._running.pop(reply.key)
        self._cancelled.pop(task, None)
        task.remove_done_callback(self._task_ended)  # it would cost a pass of the loop
        reply.end()

    async def _serve_logged(self, reply: Reply) -> None:
        began_at = time.perf_counter()
        try:
            await self._serve(reply)
        finally:
            took_s = time.perf_counter() - began_at
            user_logging.log_query(reply.assignment.query, reply.status, took_s)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Note the end of a task that was cancelled, by user code too, perhaps before it began."""
        reply = self._cancelled.pop(task, None)
        if reply is None:
            reply = next(each for running, each in self._running.values() if running is task)
        del self._running[reply.key]
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
        except _RefusedError as error:
            return FailedAnswer(query.id, InvalidRequestError.__name__, str(error))
        except GreenroomError as error:
            return _failed_by_us(reply, call, error)
        except BaseException as error:
            # Closed: this is collected, with the GeneratorExit of one that would not be cancelled.
            if self.loop.is_closed() or asyncio.current_task() in self._cancelled:
                raise
            if reply.span is not None:
                reply.span.failed(error)
            return _failed(query, error, is_http=isinstance(call, HttpCall))

    async def _answer_python(self, reply: Reply, call: PythonCall) -> Answer | None:
        try:
            args, kwargs = arguments_of(call)
        except ModuleNotFoundError as error:
            raise _RefusedError(
                f"the arguments of a call to {call.method} have objects of a module that the "
                f"deployment lacks ({error}); import it in the application's modules, or add it to "
                "the runtime_env's py_modules"
            ) from error
        if reply.upload is not None:
            args = (*args, _values_of(reply.upload))
        function = self._method(call.method)
        if not (args or kwargs) and self._gets_a_request(call.method, function):
            responses = self._responses or self._import_responses()
            args = (responses.make_request(NO_REQUEST, reply),)
        result = await self._invoke(call.method, function, args, kwargs)
        if not call.stream:
            return ValueAnswer(reply.assignment.query.id, dumps(result, "returned"))
        if hasattr(result, "__next__"):
            result = self._threads.iterate(result)
        if not hasattr(result, "__aiter__"):
            raise UnsupportedResultError(
                f"{call.method} returned a {type(result).__name__}; a call with stream=True is for "
                "generators"
            )
        await give_values(reply, result)
        return None

    def _gets_a_request(self, name: str, function: Any) -> bool:
        """Return whether a call without arguments gets an empty request, as in Ray Serve 1.x.

        There handlers were written for HTTP, and handles called the same ones. Only what belongs to
        no application was deployed in that way.
        """
        replica = user_context.replica_context()
        is_alone = replica is not None and not replica.app_name
        return is_alone and self._manners.of(name, function).needs_argument

    async def _answer_http(self, reply: Reply, call: HttpCall) -> Answer | None:
        responses = self._responses or self._import_responses()
        has_extra_headers = self.session_affinity is not None or self.served_by_header
        replica = user_context.replica_context() if has_extra_headers else None
        if self.session_affinity is not None and replica is not None:
            route, tag = reply.assignment.route, replica.replica_tag
            cookie = new_cookie(self.session_affinity, call.headers, route, tag)
            reply.extra_headers = () if cookie is None else ((b"set-cookie", cookie),)
        if self.served_by_header and replica is not None:
            reply.extra_headers += ((b"x-served-by", replica.replica_tag.encode()),)
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
        manner = self._manners.of(method, function)
        try:
            result = await self._call(manner, function, (request,) if manner.takes_argument else ())
        except responses.HTTPException as error:
            refused: Answer = responses.from_http_exception(reply.assignment.query.id, error)
            return refused
        if isinstance(result, GeneratorType):
            result = self._threads.iterate(result)
        answer: Answer | None = await responses.give_answer(reply, result, request)
        return answer

    def _import_responses(self) -> Any:
        from greenroom.actors.replica import responses  # noqa: PLC0415

        self._responses = responses
        return responses

    def _check_method_header(self, name: str) -> None:
        """Refuse what HTTP requests may not call; clients do not learn what there is."""
        if self._asgi is not None:
            text = (
                "an ASGI app answers this deployment's requests, and the header "
                "X-Serve-Call-Method would go past it; leave the header out"
            )
        elif self.http_call_methods is not None and not self.http_call_methods:
            text = "this deployment takes no header X-Serve-Call-Method; leave it out"
        elif name == "__call__" or name in self._callable_by_http():
            return
        else:
            text = (
                f"header X-Serve-Call-Method: {name[:100]!r} is no method that HTTP requests may "
                "call here"
            )
        raise _RefusedError(text)

    def _callable_by_http(self) -> frozenset[str]:
        named = self.http_call_methods
        return self._http_methods if named is None else self._http_methods.intersection(named)

    def _method(self, name: str, *, is_http: bool = False) -> Any:
        if name in {"", "__call__"}:
            if callable(self._callable):
                return self._callable
            name = "__call__"
        method = None if name.startswith("_") else getattr(self._callable, name, None)
        if callable(method):
            return method
        kind = type(self._callable)
        methods = [each for each in dir(kind) if callable(getattr(kind, each, None))]
        public = [each for each in methods if each == "__call__" or not each.startswith("_")]
        if not public:  # no mistake of the caller's
            raise GreenroomError("the deployment has no method that can be called")
        if is_http:
            can_be_named = "name one of its methods in the header X-Serve-Call-Method"
            only_by_handles = "no method is open to HTTP requests: see the option http_call_methods"
            hint = can_be_named if self._callable_by_http() else only_by_handles
            raise _RefusedError(f"the deployment has no {name}; {hint}")
        raise _RefusedError(f"the deployment has no method {name!r}; it has: {', '.join(public)}")

    async def _invoke(self, name: str, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        return await self._call(self._manners.of(name, function), function, args, kwargs)

    async def _call(self, manner: Manner, function: Any, args: Any, kwargs: Any = NO_KWARGS) -> Any:
        if manner.is_async:
            return await function(*args, **kwargs)
        if manner.makes_generator:
            return function(*args, **kwargs)
        return await self._threads.run(function, args, kwargs)


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
    """Yield what a caller streams, value by value."""
    pieces: list[bytes] = []
    while (part := await upload.next()) is not None and part.ends != END:
        pieces.append(part.data)
        if part.ends != MORE:
            yield pickle.loads(b"".join(pieces))
            pieces.clear()


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
    failure = Failure.of(error)
    user_logging.log_failure(query, error)
    kind = "UserCodeError"
    if is_http:
        return FailedAnswer(query.id, kind, "the deployment raised an exception")
    return FailedAnswer(
        query.id, kind, failure.text, exception=failure.exception, traceback=failure.traceback
    )


async def _without_result(coroutine: Any) -> None:
    await coroutine


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


def _is_sync(target: Any) -> bool:
    """Return whether a function, or each method of a class, is sync, so it needs no event loop."""
    methods = [target]
    if inspect.isclass(target):
        methods = [inspect.getattr_static(target, name) for name in dir(target)]
    functions = [getattr(method, "__func__", method) for method in methods]  # of staticmethods too
    return not hasattr(target, ASGI_APP) and not any(
        is_async(function) or inspect.isasyncgenfunction(function) for function in functions
    )


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
