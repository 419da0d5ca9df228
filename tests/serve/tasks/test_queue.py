"""Task consumers and their queues: by handles in this process, by HTTP in a running system."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Dict  # noqa: UP035  # users have it

import pytest

from greenroom import serve
from greenroom.core.errors import (
    BodyTooLargeError,
    ConflictError,
    InvalidRequestError,
    OtherJobError,
    UnknownNameError,
)
from greenroom.persistence.kv import MemoryStore, check_found
from greenroom.serve import local_testing
from greenroom.serve.build import build
from greenroom.serve.tasks.callbacks import signature
from tests.support.systems import RunningSystem, running_system, wait_until

CONFIG = serve.TaskProcessorConfig(max_retries=1, retry_pause_s=0.05, max_job_bytes=200)


@serve.deployment
@serve.task_consumer(task_processor_config=CONFIG)
class Local:
    def __init__(self) -> None:
        self.runs = 0

    @serve.task_handler
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    @serve.task_handler(name="flaky")
    async def _flaky(self) -> dict[str, int]:
        self.runs += 1
        if self.runs == 1:
            raise ValueError("the first time")
        return {"runs": self.runs}

    @serve.task_handler
    def total(self, numbers: list[int], most: int = None) -> int:  # type: ignore[assignment]  # noqa: RUF013
        return min(sum(numbers), most or 1000)

    @serve.task_handler
    def large(self) -> str:
        return "x" * 1000


@pytest.fixture(scope="module")
def queue():
    yield serve.run(Local.bind(), name="local", _local_testing_mode=True)
    local_testing.shutdown()  # else other files' handles would look here


def ended(queue: Any, job_id: str) -> dict[str, Any]:
    def check() -> Any:
        job = queue.get_task_status.remote(job_id).result(timeout_s=5)
        return job if job["status"] not in ("QUEUED", "RUNNING") else None

    return wait_until(check, 10, "the job has ended")


def enqueue(queue: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return queue.enqueue_task.remote(*args, **kwargs).result(timeout_s=5)


def test_a_job_runs_and_its_result_stays(queue):
    job = enqueue(queue, "add", [2], {"b": 3})
    assert ended(queue, job["id"])["status"] == "SUCCEEDED"
    for _ in range(2):
        assert queue.get_task_result.remote(job["id"]).result(timeout_s=5) == 5


def test_a_handler_that_raises_runs_again(queue):
    job = enqueue(queue, "flaky")
    assert ended(queue, job["id"])["runs"] == 2
    assert queue.get_task_result.remote(job["id"]).result(timeout_s=5) == {"runs": 2}


@serve.deployment
@serve.task_consumer(
    task_processor_config=serve.TaskProcessorConfig(max_retries=1, retry_pause_s=1.0)
)
class Unlucky:
    runs = 0

    @serve.task_handler
    def run(self) -> int:
        self.runs += 1
        if self.runs == 1:
            raise ValueError("the first time")
        return self.runs


def test_a_clock_that_is_set_back_holds_no_repetition_back(monkeypatch):
    queue = serve.run(Unlucky.bind(), name="unlucky", _local_testing_mode=True)
    job_id = enqueue(queue, "run")["id"]
    status = lambda: queue.get_task_status.remote(job_id).result(timeout_s=5)  # noqa: E731
    wait_until(lambda: status()["error"], 10, "it has failed once")
    there = time.time
    monkeypatch.setattr(time, "time", lambda: there() - 3600.0)
    assert ended(queue, job_id)["status"] == "SUCCEEDED"


def test_a_result_that_is_too_large_fails_the_job_at_once(queue):
    job = ended(queue, enqueue(queue, "large")["id"])
    assert (job["status"], job["runs"]) == ("FAILED", 1)
    assert "max_job_bytes" in job["error"]
    with pytest.raises(ConflictError, match="FAILED"):
        queue.get_task_result.remote(job["id"]).result(timeout_s=5)


def test_calls_that_no_handler_takes_are_refused(queue):
    for error, found, call in (
        (UnknownNameError, "add", ("none",)),
        (InvalidRequestError, "'a'", ("add",)),
        (InvalidRequestError, "'c'", ("add", [1], {"c": 1})),
        (InvalidRequestError, "JSON", ("add", [float("nan")])),
        (InvalidRequestError, "a='2': must be a valid integer", ("add", ["2"])),
        (InvalidRequestError, "b=True: must be a valid integer", ("add", [2], {"b": True})),
        (InvalidRequestError, "21 values are of other types", ("total", [[""] * 21])),
        (BodyTooLargeError, "max_job_bytes=200", ("add", ["x" * 300])),
    ):
        with pytest.raises(error, match=found):
            enqueue(queue, *call)
    for found, call in (
        ("task_name=3: must be a non-empty string", {"task_name": 3}),
        ("args='12': must be a list", {"args": "12"}),
        ("args=None: must be a list", {"args": None}),
        ("args=0: must be a list", {"args": 0}),
        (r"kwargs=\[1\]: must be a dict", {"kwargs": [1]}),
        (r"kwargs=\[\]: must be a dict", {"kwargs": []}),
        ("kwargs='': must be a dict", {"kwargs": ""}),
        ("kwargs=0: must be a dict", {"kwargs": 0}),
        ("kwargs=False: must be a dict", {"kwargs": False}),
        ("idempotency_key=3: must be a string, or None", {"idempotency_key": 3}),
        ("callback_url=3: must be a string, or None", {"callback_url": 3}),
    ):
        with pytest.raises(InvalidRequestError, match=found):
            enqueue(queue, **{"task_name": "total", "args": [[1]], **call})
    with pytest.raises(InvalidRequestError, match="off"):
        enqueue(queue, "add", [1], callback_url="https://a.example")
    with pytest.raises(InvalidRequestError, match="255"):
        enqueue(queue, "add", [1], idempotency_key="x" * 256)


def test_what_is_no_id_or_status_is_refused(queue):
    for method in (queue.get_task_status, queue.get_task_result, queue.cancel_task):
        with pytest.raises(
            InvalidRequestError, match=r"task_id=\['a'\]: must be a non-empty string"
        ):
            method.remote(["a"]).result(timeout_s=5)
    with pytest.raises(InvalidRequestError, match="status=3: must be a string"):
        queue.list_tasks.remote(3).result(timeout_s=5)


def test_a_job_may_be_given_none_for_what_it_has_not(queue):
    job = enqueue(queue, "add", [1], None, idempotency_key=None, callback_url=None)
    assert ended(queue, job["id"])["status"] == "SUCCEEDED"


def test_none_is_taken_where_it_is_the_default(queue):
    assert enqueue(queue, "total", [[1]], {"most": None})["status"] == "QUEUED"


@pytest.mark.parametrize("kind", [dict, Dict, "a text", "int | 'Job'", "typing.Job", "Job"])  # noqa: UP006
def test_a_handler_may_have_any_annotation(kind):
    class Consumer:
        def run(self, job: Any) -> None: ...

    Consumer.run.__annotations__["job"] = kind
    serve.task_handler(Consumer.run)
    serve.task_consumer(Consumer)


def test_a_key_makes_two_requests_one_job(queue):
    first = enqueue(queue, "add", [1], idempotency_key="k")
    assert enqueue(queue, "add", [1], idempotency_key="k")["id"] == first["id"]
    assert enqueue(queue, "add", [1])["id"] != enqueue(queue, "add", [1])["id"]
    with pytest.raises(OtherJobError):
        enqueue(queue, "add", [2], idempotency_key="k")


class Held(MemoryStore):
    """Calls ``hold`` before it is saved that a job runs."""

    hold: Callable[[], object]

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        if any(b'"RUNNING"' in value for value in puts.values()):
            type(self).hold()
        super().apply(puts, deletes)


@serve.deployment
@serve.task_consumer(task_processor_config=CONFIG)
class Noted:
    @serve.task_handler
    def run(self, file: str) -> None:
        with open(file, "a") as runs:
            runs.write("it runs\n")


class WithoutCalls(MemoryStore):
    """Loses what jobs are called with, but for what has "kept" in it."""

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        lost = {key for key in puts if key.startswith("call/") and b"kept" not in puts[key]}
        super().apply({key: puts[key] for key in puts.keys() - lost}, deletes)


class Damaged(MemoryStore):
    """Finds what jobs are called with damaged when it is read, but for what has "kept" in it."""

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        if key.startswith("call/") and value is not None and b"kept" not in value:
            self.lost = {**self.lost, key: "both of its copies are damaged"}
            check_found(self, key)
        return value


@pytest.mark.parametrize("store", [WithoutCalls, Damaged])
def test_a_job_whose_call_is_lost_fails_for_good_and_makes_room(monkeypatch, tmp_path, store):
    monkeypatch.setattr("greenroom.serve.tasks.queue.MemoryStore", store)
    queue = serve.run(Noted.bind(), name="lossy", _local_testing_mode=True)
    jobs = [enqueue(queue, "run", [str(tmp_path / "lost")])["id"] for _ in range(10)]
    kept = enqueue(queue, "run", [str(tmp_path / "kept")])["id"]
    assert ended(queue, kept)["status"] == "SUCCEEDED"
    for each in jobs:
        job = ended(queue, each)
        assert (job["status"], job["runs"]) == ("FAILED", 1)
        assert job["error"].startswith("its call is lost from the store")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr("greenroom.serve.tasks.queue.MemoryStore", Held)
    yield serve.run(Noted.bind(), name="noted", _local_testing_mode=True)
    local_testing.shutdown()


def test_that_a_job_runs_is_saved_before_it_runs(held, tmp_path):
    file = tmp_path / "runs"
    has_run: list[bool] = []

    def hold() -> None:
        until = time.monotonic() + 0.3
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        has_run.append(file.exists())

    Held.hold = staticmethod(hold)
    ended(held, enqueue(held, "run", [str(file)])["id"])
    assert has_run == [False]
    assert file.read_text() == "it runs\n"


def test_a_job_that_is_cancelled_before_that_is_saved_does_not_run(held, tmp_path):
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert may_go.wait(10)

    Held.hold = staticmethod(hold)
    job = enqueue(held, "run", [str(tmp_path / "first")])
    assert is_held.wait(10)
    cancelling = held.cancel_task.remote(job["id"])
    jobs = lambda: held.get_metrics.remote().result(timeout_s=5)["jobs"]  # noqa: E731
    wait_until(lambda: jobs() == {"CANCELLED": 1}, 5, "it is cancelled")
    may_go.set()
    assert cancelling.result(timeout_s=5)["status"] == "CANCELLED"
    ended(held, enqueue(held, "run", [str(tmp_path / "second")])["id"])
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_the_queue_is_a_deployment_before_the_consumer():
    built = build(Local.bind(), "app")
    assert built.applications[0].ingress == "Local-queue"
    consumer, before = built.deployments
    assert (consumer.name, before.config.num_replicas) == ("Local", 1)
    assert before.config.retryable
    assert before.config.http_call_methods == ()


def test_the_queue_has_the_secret_of_its_consumer_wherever_that_is_given():
    def env(secret: str) -> dict[str, Any]:
        return {"env_vars": {"GREENROOM_CALLBACK_SECRET": secret, "OTHER": "x"}}

    in_code = Local.options(actor_options={"runtime_env": env("code's")}).bind()
    by_file = {"Local": {"actor_options": {"runtime_env": env("file's")}}}
    for options, secret in (({}, "code's"), (by_file, "file's")):
        consumer, before = build(in_code, "app", options=options).deployments
        assert consumer.actor_options.runtime_env.env_vars["OTHER"] == "x"
        assert before.actor_options.runtime_env.env_vars == {"GREENROOM_CALLBACK_SECRET": secret}
        assert before.actor_options.label_selector


# --- By HTTP, in a running system -----------------------------------------------------------------


@serve.deployment
@serve.task_consumer(
    task_processor_config=serve.TaskProcessorConfig(
        max_running=2, retry_pause_s=0.1, callback_hosts=("127.0.0.1",)
    )
)
class Slow:
    @serve.task_handler
    def run(self, number: int, folder: str, wait_s: float = 0.02) -> int:
        with (Path(folder) / str(number)).open("a") as runs:
            runs.write(f"{os.getpid()}\n")
        time.sleep(wait_s)
        return number

    @serve.task_handler
    async def wait(self, folder: str) -> None:
        import asyncio  # noqa: PLC0415  # the module's are not the replica's

        (Path(folder) / "begun").touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            (Path(folder) / "cancelled").touch()
            raise


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    with running_system(folder, GREENROOM_CALLBACK_SECRET="s3cret") as system:
        system.deploy(Slow.bind(), route_prefix="/slow")
        env = {"env_vars": {"GREENROOM_CALLBACK_SECRET": "its own"}}
        own = Slow.options(ray_actor_options={"runtime_env": env})
        system.deploy(own.bind(), name="own", route_prefix="/own")
        yield system


def ask(
    system: RunningSystem,
    method: str,
    path: str,
    body: Any = None,
    *,
    route: str = "/slow",
    **headers: str,
) -> tuple[int, Any, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{system.environ['GREENROOM_HTTP_PORT']}{route}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        content = answer.read()
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content.decode(), answer.headers


def test_a_job_is_accepted_reported_and_cancelled_by_http(system, tmp_path):
    status, job, headers = ask(system, "POST", "/wait", {"folder": str(tmp_path)})
    assert (status, headers["location"]) == (202, f"/slow/{job['id']}")
    wait_until((tmp_path / "begun").exists, 10, "the job runs")
    assert ask(system, "GET", f"/{job['id']}")[1]["status"] == "RUNNING"
    assert ask(system, "GET", f"/{job['id']}/result")[0] == 202
    status, found, _ = ask(system, "GET", "?status=RUNNING")
    assert (status, "list_jobs=True" in found) == (403, True)
    assert "latest" not in ask(system, "GET", "")[1]
    assert ask(system, "DELETE", f"/{job['id']}")[1]["status"] == "CANCELLED"
    wait_until((tmp_path / "cancelled").exists, 10, "async code is cancelled")
    assert ask(system, "GET", f"/{job['id']}/result")[0] == 409


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/none", {}, 404, "there are: run, wait"),
        ("POST", "/run", {"numbre": 1}, 400, "number"),
        ("POST", "/run", [1], 400, "JSON object"),
        ("POST", "/run", {"number": 1, "folder": "x" * 1024**2}, 413, "max_job_bytes"),
        ("GET", "/none", None, 404, "there is no job 'none'"),
        ("GET", "?status=none", None, 400, "must be one of QUEUED"),
        ("DELETE", "/none", None, 404, "no job"),
        ("PUT", "/none", {}, 405, "PUT"),
    ],
)
def test_bad_requests_hear_what_is_wrong(system, method, path, body, status, message):
    answer = ask(system, method, path, body)
    assert answer[0] == status
    assert message in answer[1]


@pytest.mark.slow
def test_accepted_jobs_outlive_the_death_of_any_process(system, tmp_path):
    folder = str(tmp_path)
    jobs: dict[str, int] = {}

    def submit(count: int) -> None:
        for number in range(len(jobs), len(jobs) + count):
            body = {"number": number, "folder": folder}

            def accepted(number: int = number, body: Any = body) -> Any:
                key = f"{folder} {number}"
                with contextlib.suppress(OSError):  # of the worker's end
                    answer = ask(system, "POST", "/run", body, Idempotency_Key=key)
                    return answer[1]["id"] if answer[0] == 202 else None
                return None

            jobs[wait_until(accepted, 20, "a job is accepted")] = number

    deployments = system.status_json()["applications"]["default"]["deployments"]
    pids = [deployments[name]["replicas"][0]["pid"] for name in ("Slow-queue", "Slow")]
    pids += [system.pid_of("http worker"), system.pid_of("proxy"), system.pid_of("controller")]
    for pid in pids:
        submit(5)
        os.kill(pid, signal.SIGKILL)
        submit(5)
    assert sorted(jobs.values()) == list(range(10 * len(pids)))

    def unfinished() -> list[str]:
        answers = {job_id: ask(system, "GET", f"/{job_id}/result")[:2] for job_id in jobs}
        return [job_id for job_id in jobs if answers[job_id] != (200, jobs[job_id])]

    wait_until(lambda: not unfinished(), 40, "all results are there")
    counts = ask(system, "GET", "/")[1]["jobs"]
    assert counts["SUCCEEDED"] == len(jobs)
    assert all((tmp_path / str(number)).read_text() for number in jobs.values())


@pytest.mark.parametrize(("route", "secret"), [("/slow", "s3cret"), ("/own", "its own")])
def test_a_callback_comes_signed_when_the_job_has_ended(system, tmp_path, route, secret):
    got: list[tuple[bool, Any]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            at = int(self.headers["webhook-timestamp"])
            wanted = signature(secret, self.headers["webhook-id"], at, body)
            got.append((self.headers["webhook-signature"] == wanted, json.loads(body)))
            self.send_response(500 if len(got) == 1 else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        body = {"number": 1, "folder": str(tmp_path)}
        url = f"http://127.0.0.1:{server.server_port}/"
        _, job, _ = ask(system, "POST", "/run", body, route=route, Callback_URL=url)
        wait_until(lambda: len(got) == 2, 15, "the callback comes again after a 500")
        server.shutdown()
        thread.join()
    assert [(good, found["id"], found["status"]) for good, found in got] == [
        (True, job["id"], "SUCCEEDED")
    ] * 2
