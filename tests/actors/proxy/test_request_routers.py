"""Request routers of users: real processes beside a real proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.config import RequestRouterConfig
from greenroom.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from tests.support.metrics import scraped, scraped_anew, total
from tests.support.systems import RunningSystem, alive, running_system, wait_until

ROLE = "request-router"
PATIENT = {"timeout_s": 5}  # for a crowded machine


class PrefixRouter(RequestRouter):
    """Sends prompts that begin alike to the replica that had the last one of them."""

    def initialize_state(self, length: int = 4) -> None:
        self.length = length
        self.had: dict[str, ReplicaID] = {}

    async def prefix(self, request: PendingRequest) -> str:
        given = request.args[0]
        prompt = given if isinstance(given, str) else (await given.json())["prompt"]
        return str(prompt)[: self.length]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        assert pending_request.metadata.app_name == self.app_name == "default"
        prefix = await self.prefix(pending_request)
        home = self.had.get(prefix)
        best = [replica for replica in candidate_replicas if replica.replica_id == home]
        if not best:
            taken = list(self.had.values())
            best = [min(candidate_replicas, key=lambda each: taken.count(each.replica_id))]
        self.had[prefix] = best[0].replica_id
        return [best, self.select_available_replicas(candidate_replicas)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        print("routed", pending_request.metadata.request_id, replica_id.unique_id, flush=True)


class Raising(RequestRouter):
    def initialize_state(self) -> None:
        raise RuntimeError("no weights")


class Blocking(RequestRouter):
    async def choose_replicas(self, *_args: Any) -> Any:
        while True:
            time.sleep(60)


class Slow(RequestRouter):
    async def choose_replicas(self, *_args: Any) -> Any:
        await asyncio.sleep(60)


class Leaving(RequestRouter):
    async def choose_replicas(self, *_args: Any) -> Any:
        sys.exit(3)


class OfStrangers(RequestRouter):
    async def choose_replicas(self, *_args: Any) -> Any:
        return [["another"]]


class OfNothing(RequestRouter):
    async def choose_replicas(self, *_args: Any) -> Any:
        return None


class Wherever(RequestRouter):
    async def choose_replicas(self, *_args: Any) -> Any:
        return []


class Ranked(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    """Chooses a model's replicas, then those of the host; as in Ray Serve's guide."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        model = pending_request.metadata.multiplexed_model_id
        by_model = self.rank_replicas_via_multiplex(candidate_replicas, model)
        near, far = self.rank_replicas_via_locality(candidate_replicas)
        assert (len(near), far) == (len(candidate_replicas), [])
        return [rank for rank in by_model if rank]


@serve.deployment(num_replicas=3)
class Pids:
    async def __call__(self, request: Any) -> str:
        return str(os.getpid())

    async def die_once(self, prompt: str, first: int) -> int:
        if os.getpid() == first:
            os.kill(first, signal.SIGKILL)
        return os.getpid()

    async def count(self, prompt: str) -> Any:
        for _ in range(3):
            yield os.getpid()


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("state")) as running:
        yield running


def deploy(system: RunningSystem, router: Any, **settings: Any) -> serve.DeploymentHandle:
    config = RequestRouterConfig(request_router_class=router, **settings)
    system.deploy(Pids.options(request_router_config=config).bind())
    with system.as_default():
        return serve.get_app_handle("default")


def ask(system: RunningSystem, prompt: str) -> int:
    status, body = system.get(data=f'{{"prompt": "{prompt}"}}'.encode())
    assert status == 200, body
    return int(body)


def until(system: RunningSystem, outcome: str, send: Callable[[], Any]) -> None:
    """Send queries, each of which must be answered, until one has had this outcome."""

    def counted() -> float:
        counter = "greenroom_request_router_questions_total"
        return total(scraped(system), counter, outcome=outcome)

    scraped_anew(system)
    before = counted()

    def is_there() -> bool:
        send()
        return counted() > before

    wait_until(is_there, 20, f"a query was {outcome}")


@pytest.mark.slow
def test_equal_prefixes_meet_one_replica_by_http_and_by_handle_also_after_deaths(system):
    handle = deploy(system, PrefixRouter, request_router_kwargs={"length": 3}, **PATIENT)
    until(system, "chosen", lambda: ask(system, "warm"))
    by_prefix = {
        prefix: {ask(system, f"{prefix} and {number}") for number in range(5)}
        for prefix in ("aaa", "bbb", "ccc")
    }
    assert all(len(pids) == 1 for pids in by_prefix.values())
    assert len({pid for pids in by_prefix.values() for pid in pids}) == 3
    (pid,) = by_prefix["bbb"]
    assert int(handle.remote("bbb by handle").result(30)) == pid
    assert list(handle.options(stream=True).count.remote("bbb in parts")) == [pid] * 3
    died = handle.options(retryable=True).die_once.remote("bbb that kills", pid).result(30)
    assert died != pid, "it was retried at the next rank"
    wait_until(lambda: len(system.replica_pids()) == 3, 20, "another replica")
    (router,) = [pid for role, pid in system.pids() if role == ROLE]
    log = next(system.settings.logs_dir.glob(f"{ROLE}-*.log")).read_text()
    assert log.count("routed") >= 18

    os.kill(router, signal.SIGKILL)
    assert ask(system, "aaa while it is gone") in system.replica_pids()
    until(system, "chosen", lambda: ask(system, "aaa again"))
    assert not alive(router)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "outcome", "settings"),
    [
        (Raising, "unavailable", {}),
        (Slow, "late", {}),
        (OfStrangers, "failed", PATIENT),
        (OfNothing, "failed", PATIENT),
        (Wherever, "none", PATIENT),
        (Ranked, "chosen", PATIENT),
    ],
)
def test_whatever_it_does_queries_are_answered(system, router, outcome, settings):
    deploy(system, router, **settings)
    until(system, outcome, lambda: ask(system, "x"))


@pytest.mark.slow
def test_one_that_calls_exit_has_failed_to_answer_and_goes_on(system):
    deploy(system, Leaving, **PATIENT)
    until(system, "failed", lambda: ask(system, "x"))
    (first,) = [pid for role, pid in system.pids() if role == ROLE]
    for _ in range(3):
        until(system, "failed", lambda: ask(system, "x"))
    assert alive(first)


@pytest.mark.slow
def test_one_that_blocks_is_killed_and_started_again(system):
    deploy(system, Blocking)
    until(system, "late", lambda: ask(system, "x"))
    (first,) = [pid for role, pid in system.pids() if role == ROLE]

    def is_gone() -> bool:
        ask(system, "x")
        return not alive(first)

    wait_until(is_gone, 20, "it was killed")
    system.deploy(Pids.bind())
    wait_until(lambda: ROLE not in [role for role, _ in system.pids()], 10, "none is left")
    assert ask(system, "x") in system.replica_pids()
