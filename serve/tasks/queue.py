"""The deployment that stands before a task consumer: it keeps jobs, and sends them to it.

Theory of operation. One replica has the queue's store, beside the controller's; its lock or lease
and its epoch keep any other out, such as the next one of a rolling update, which waits until the
one before has closed it.
Whatever is answered waits until it is durable. Each job that runs is a call of the consumer's
handle, so the router finds it a replica; the call is not retried there, because the queue counts
runs itself. A replica that starts after a crash finds in the store all that was accepted.

A request for a new job that is repeated, because this replica died under it, is the same call of
the same caller. So the two are one job, as those of one idempotency key are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from greenroom.actors.replica import context as user_context
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.config import CALLBACK_SECRET
from greenroom.core.errors import (
    BackPressureError,
    BodyTooLargeError,
    ConflictError,
    DeploymentUnavailableError,
    ForbiddenError,
    GreenroomError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotRunningError,
    RequestCancelledError,
    StateNotSavedError,
    UnknownNameError,
)
from greenroom.core.jobs import MAX_KEY_CHARACTERS, Job, Jobs, Status
from greenroom.core.records import served_as
from greenroom.core.validation import problems_in, unknown_name
from greenroom.persistence.kv import CorruptValueError, MemoryStore, StoreError
from greenroom.persistence.locations import location_at
from greenroom.serve.admin.checks import check_list, check_mapping, check_name, check_text
from greenroom.serve.handle import DeploymentHandle, DeploymentResponse
from greenroom.serve.protocols.apps import describe_failure
from greenroom.serve.tasks.callbacks import CallbackRefusedError, call_back, origin_of, target_of
from greenroom.serve.tasks.consumers import RUN, Consumer, types_of
from greenroom.serve.tasks.log import CALL, RESULT, JobLog, values_of

logger = logging.getLogger(__name__)
SHOWN = 100  # jobs in a list
MOST_PROBLEMS = 20  # of a call that are listed one by one
OPEN_TIMEOUT_S = 20.0  # that a request waits for the store
CALLBACKS_AT_ONCE = 8
RETRY_AFTER = {"retry-after": "1"}
HIDDEN = frozenset(
    {"number", "size", "key", "digest", "due_at", "callback_at", "cut", "deferred", "failures"}
)


def describe(job: Job) -> dict[str, Any]:
    """Return what clients and callbacks see of a job."""
    fields = {name: value for name, value in asdict(job).items() if name not in HIDDEN}
    return {**fields, "callback": origin_of(job.callback)}


def _check_status(status: str | None) -> None:
    check_text("status", status)
    if status is not None and status not in get_args(Status):
        known = ", ".join(get_args(Status))
        raise InvalidRequestError(f"status={status[:40]!r}: must be one of {known}")


def _steady_clock() -> Callable[[], float]:
    """Return what tells the seconds since the epoch by the clock as it is set now.

    One that is set later would hold repetitions back, or have results forgotten.
    """
    began_at = time.time() - time.monotonic()
    return lambda: began_at + time.monotonic()


class TaskQueue:
    """The jobs of one consumer; its methods are for handles, and HTTP is a layer over them."""

    def __init__(self, consumer: DeploymentHandle, known: Consumer) -> None:
        replica = user_context.replica_context()
        assert replica is not None, "a queue is a deployment"
        application = replica.backend.partition("#")[0]
        if application != served_as(application):
            raise RuntimeError(
                "an application with a task consumer cannot run beside its new version; deploy it "
                "without --canary"
            )
        self._consumer, self._tasks, self._config = consumer, known.tasks, known.config
        self._types = {name: types_of(signature) for name, signature in known.tasks.items()}
        self._secret = os.environ.get(CALLBACK_SECRET, "")
        name = f"{replica.app_name}#{replica.deployment}"
        is_local = user_context.local_replica.get() is not None  # see serve.local_testing
        location = location_at(read_settings().store_name, f"jobs {name}")
        self._log = JobLog(MemoryStore if is_local else location.open)
        self._jobs = Jobs(known.config)
        self._now = _steady_clock()
        self._calls: dict[str, DeploymentResponse] = {}
        self._tasks_under_way: set[asyncio.Task[None]] = set()
        self._failure = ""  # of the opening
        self._woken = asyncio.Event()
        self._opened = asyncio.Event()
        self._callbacks = asyncio.Semaphore(CALLBACKS_AT_ONCE)

    async def warmup(self) -> None:
        """Begin, without waiting for the store: an earlier replica may have it until this is up."""
        self._spawn(self._serve())

    def __del__(self) -> None:
        """Let the next replica have the store at once."""
        with contextlib.suppress(AttributeError):  # the constructor has raised
            self._log.close()

    # --- For handles --------------------------------------------------------------------------

    async def enqueue_task(
        self,
        task_name: str,
        args: list[Any] | tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        callback_url: str | None = None,
    ) -> dict[str, Any]:
        """Enqueue a job and return it, once it is durable.

        With an idempotency key that a job has, that job is returned. InvalidRequestError for a call
        that the handler cannot be given; TooManyJobsError and JobsTooLargeError where there is no
        room; StateNotSavedError where the disk refuses.
        """
        check_name("task_name", task_name)
        check_list("args", args)
        kwargs = {} if kwargs is None else kwargs
        check_mapping("kwargs", kwargs)
        check_text("idempotency_key", idempotency_key)
        check_text("callback_url", callback_url)
        idempotency_key, callback_url = idempotency_key or "", callback_url or ""
        await self._open()
        call = self._call(task_name, args, kwargs)
        if len(idempotency_key) > MAX_KEY_CHARACTERS:
            raise InvalidRequestError(
                f"Idempotency-Key={idempotency_key[:40]!r}...: must be at most "
                f"{MAX_KEY_CHARACTERS} characters"
            )
        if callback_url:
            target_of(callback_url, self._config.callback_hosts, self._secret)
        parts = (task_name.encode(), call, callback_url.encode())
        job = Job(
            id=secrets.token_hex(16),
            number=0,
            task=task_name,
            created_at=self._now(),
            size=len(call),
            key=f"key {idempotency_key}" if idempotency_key else f"call {user_context.call_id()}",
            digest=hashlib.sha256(b"\0".join(parts)).hexdigest(),
            callback=callback_url,
        )
        if self._log.problem:
            await self._log.durable()  # raises
        taken = self._jobs.submit(job)
        if taken.id == job.id:
            self._log.change({CALL + job.id: call})
        return await self._described(taken)

    async def get_task_status(self, task_id: str) -> dict[str, Any]:
        """Return a job; UnknownNameError for none."""
        check_name("task_id", task_id)
        await self._open()
        return await self._described(self._jobs.get(task_id))

    async def get_task_result(self, task_id: str) -> Any:
        """Return a job's result; ConflictError where it has none (yet)."""
        return json.loads(await self._result(task_id))

    async def cancel_task(self, task_id: str) -> dict[str, Any]:
        """Cancel a job that waits or runs; ConflictError for one that is over in another way.

        Async code gets asyncio.CancelledError; what sync code returns is dropped.
        """
        check_name("task_id", task_id)
        await self._open()
        job = self._jobs.cancel(task_id, self._now())
        described = await self._described(job)
        call = self._calls.get(task_id)
        if call is not None:
            call.cancel()
        return described

    async def get_metrics(self) -> dict[str, Any]:
        """Return how many jobs there are, by status, and how much room they take."""
        await self._open()
        config = self._config
        return {
            "jobs": self._jobs.counts(),
            "bytes": self._jobs.bytes,
            "max_jobs": config.max_jobs,
            "max_kept_bytes": config.max_kept_bytes,
            "problem": self._log.problem,
        }

    async def list_tasks(self, status: str | None = None) -> list[dict[str, Any]]:
        """Return the latest hundred jobs of all clients, or of those with a status."""
        _check_status(status)
        await self._open()
        jobs = self._jobs.latest(status, SHOWN)
        await self._saved()
        return [describe(job) for job in jobs]

    def check_health(self) -> None:
        """Raise once another queue has the store: a replica that can do nothing is replaced."""
        if self._failure or self._log.is_superseded:
            raise RuntimeError(self._failure or self._log.problem)

    # --- HTTP ---------------------------------------------------------------------------------

    async def __call__(self, request: Request) -> Response:
        """Serve POST /TASK, GET /, GET /ID, GET /ID/result and DELETE /ID."""
        root = request.scope.get("root_path", "")
        path = request.scope["path"].removeprefix(root).strip("/")
        try:
            return await self._respond(request, root, path)
        except GreenroomError as error:
            status, text, headers = describe_failure(error, GreenroomError)
            return PlainTextResponse(text, status, headers)

    async def _respond(self, request: Request, root: str, path: str) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        if method == "POST":
            described = await self._post(request, path)
            location = f"{root}/{described['id']}"
            return JSONResponse(described, 202, {"location": location, **RETRY_AFTER})
        if method == "GET" and not path:
            return JSONResponse(await self._overview(request.query_params.get("status")))
        if method == "GET" and path.endswith("/result"):
            job_id = path.removesuffix("/result")
            job = await self.get_task_status(job_id)
            if job["status"] in ("QUEUED", "RUNNING"):
                return JSONResponse(job, 202, RETRY_AFTER)
            return Response(await self._result(job_id), media_type="application/json")
        if method == "GET":
            return JSONResponse(await self.get_task_status(path))
        if method == "DELETE" and path:
            return JSONResponse(await self.cancel_task(path))
        text = f"{request.method} is not among a queue's methods"
        raise MethodNotAllowedError(text, ("GET", "POST", "DELETE"))

    async def _post(self, request: Request, task: str) -> dict[str, Any]:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._config.max_job_bytes:
                raise self._too_large(len(body), "or more bytes")
        try:
            kwargs = json.loads(body or b"{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body must be JSON: {error}") from None
        if not isinstance(kwargs, dict):
            raise InvalidRequestError("the body must be a JSON object of the handler's arguments")
        return await self.enqueue_task(
            task,
            (),
            kwargs,
            idempotency_key=request.headers.get("idempotency-key"),
            callback_url=request.headers.get("callback-url"),
        )

    async def _overview(self, status: str | None) -> dict[str, Any]:
        _check_status(status)
        if self._config.list_jobs:
            return {**await self.get_metrics(), "latest": await self.list_tasks(status)}
        if status is not None:
            raise ForbiddenError(
                f"status={status}: jobs are listed to handles, by list_tasks; for all who reach "
                "this route, too, with TaskProcessorConfig(list_jobs=True)"
            )
        return await self.get_metrics()

    # --- What it does -------------------------------------------------------------------------

    def _call(self, task: str, args: Any, kwargs: dict[str, Any]) -> bytes:
        if task not in self._tasks:
            raise unknown_name("task", str(task)[:100], self._tasks)
        try:
            call = json.dumps([list(args), kwargs], allow_nan=False).encode()
            args, kwargs = json.loads(call)
            given = self._tasks[task].bind(*args, **kwargs).arguments
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"task {task!r} cannot be called so: {error}") from None
        if len(call) > self._config.max_job_bytes:
            raise self._too_large(len(call), "bytes")
        try:
            self._types[task].validate_python(given, strict=True)
        except ValidationError as error:
            count = error.error_count()  # as many as there are values: to list all takes long
            few = "; ".join(problems_in(error)) if count <= MOST_PROBLEMS else ""
            problems = few or f"{count} values are of other types than its handler says"
            raise InvalidRequestError(f"task {task!r} cannot be called so: {problems}") from None
        return call

    def _too_large(self, size: int, unit: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"a call of {size} {unit}: max_job_bytes={self._config.max_job_bytes}; put large "
            "inputs where the handler can read them"
        )

    async def _open(self) -> None:
        try:
            await asyncio.wait_for(self._opened.wait(), OPEN_TIMEOUT_S)
        except TimeoutError:
            reason = self._failure or "another replica of this queue has its store still"
            error = NotRunningError(reason)
            error.retry_after_s = 1.0
            raise error from None

    async def _saved(self) -> None:
        """Wait until all changes of jobs are durable."""
        self._change()
        await self._log.durable()

    async def _described(self, job: Job) -> dict[str, Any]:
        """Return a job as it is now, once that is durable."""
        await self._saved()
        return describe(job)

    async def _result(self, job_id: str) -> bytes:
        job = await self.get_task_status(job_id)
        if job["status"] != "SUCCEEDED":
            reason = f": {job['error']}" if job["error"] else ""
            raise ConflictError(f"job {job_id} has no result, it is {job['status']}{reason}")
        result = await self._log.get(RESULT + job_id)
        if result is None:
            raise UnknownNameError(f"the result of job {job_id} was kept until just now")
        return result

    def _change(self) -> None:
        """Write what has changed, and check for what there is to do."""
        self._log.change(values_of(self._jobs.take_changes()))
        self._woken.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks_under_way.add(task)
        task.add_done_callback(self._tasks_under_way.discard)

    async def _serve(self) -> None:
        """Run jobs, try callbacks and forget old jobs, from the opening to the end."""
        try:
            saved = await self._log.open()
        except StoreError as error:
            self._failure = f"the store of this queue cannot be opened: {error}"
            raise
        self._jobs = Jobs(self._config, saved, self._now())
        logger.info("opened with %d jobs", len(saved))
        self._opened.set()
        while True:
            now = self._now()
            self._jobs.forget_old(now)
            while (job := self._jobs.begin(now)) is not None:
                self._spawn(self._run(job))
            for due in self._jobs.due_callbacks(now):
                self._spawn(self._call_back(due))
            self._log.change(values_of(self._jobs.take_changes()))
            wake_at = self._jobs.wake_at()
            timeout_s = None if wake_at is None else max(wake_at - self._now(), 0.01)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), timeout_s)
            self._woken.clear()

    async def _run(self, job: Job) -> None:
        """Run a job once, and record what came of it."""
        ended: Callable[[], object] = partial(self._jobs.failed, job.id, "")
        result = None
        try:
            await self._saved()  # that it runs: else a job that kills its host would run for ever
            call = await self._log.get(CALL + job.id)
            if self._jobs.get(job.id).status != "RUNNING":
                return  # it was cancelled meanwhile
            if call is None:
                reason = "its call is lost from the store"
                ended = partial(self._jobs.failed, job.id, reason, is_final=True)
            else:
                run = self._consumer.options(method_name=RUN + job.task, retryable=False)
                response = self._calls[job.id] = run.remote(call)
                result = await response
                if len(result) > self._config.max_job_bytes:
                    reason = f"a result of {len(result)} bytes: max_job_bytes is smaller"
                    ended = partial(self._jobs.failed, job.id, reason, is_final=True)
                else:
                    ended = partial(self._jobs.succeeded, job.id, len(result))
        except CorruptValueError as error:  # beyond repair
            reason = f"its call is lost from the store: {error}"
            ended = partial(self._jobs.failed, job.id, reason, is_final=True)
        except (BackPressureError, DeploymentUnavailableError, StateNotSavedError, StoreError):
            ended = partial(self._jobs.defer, job.id)
        except RequestCancelledError as error:  # by cancel_task, or by the handler's own calls
            ended = partial(self._jobs.failed, job.id, f"cancelled: {error}")
        except Exception as error:  # whatever the handler raises
            ended = partial(self._jobs.failed, job.id, f"{type(error).__name__}: {error}")
        finally:
            self._calls.pop(job.id, None)
        if ended(now=self._now()) and result is not None:
            self._log.change({RESULT + job.id: result})
        self._change()

    async def _call_back(self, job: Job) -> None:
        """Try a callback, once what it says is durable."""
        was_taken = is_final = False
        async with self._callbacks:
            try:
                await self._saved()
                target = target_of(job.callback, self._config.callback_hosts, self._secret)
                await call_back(target, self._secret, describe(job), time.time())
                was_taken = True
            except (CallbackRefusedError, GreenroomError) as error:
                # What the settings refuse by now is refused the next time, too.
                is_final = isinstance(error, InvalidRequestError)
                logger.warning(
                    "callback of job %s, try %d: %s", job.id, job.callback_tries + 1, error
                )
        now = self._now()
        self._jobs.called_back(job.id, was_taken=was_taken, now=now, is_final=is_final)
        self._change()
