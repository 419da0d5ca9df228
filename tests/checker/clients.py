"""What runs on a host in a run of the checker: admin clients, HTTP clients, and user code."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from greenroom import serve
from greenroom.core.errors import ConflictError, GreenroomError, UnknownNameError
from greenroom.core.operations import CreateEndpoint, DeleteEndpoint
from tests.checker.histories import OK, REFUSED, Journal
from tests.support import cluster
from tests.support.load import ask_on, read_answer

VERSIONS = ("v0", "v1", "v2")
LIMIT = 4  # requests that a replica may run at a time
CHANGE_PAUSE_S = 0.05
RUN_S = 0.02  # that a request runs at most
ANSWER_S = 15.0  # that an HTTP client waits
CHANGE_S = 10.0  # that a change takes at most, where all is well
JOIN_S = 30.0  # longer than a client waits for a system that is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the clients of a host do in a round."""

    name: str  # unlike that of any other clients
    host: str
    port: int
    environ: dict[str, str]
    folder: Path
    endpoints: tuple[str, ...]
    changers: int
    connections: int
    pause_s: float
    seed: int


class Versioned:
    """User code: writes down what it runs, and answers with its version and the request's id."""

    def __init__(self, version: str, folder: str) -> None:
        self._version = version
        self._journal = Journal(Path(folder) / f"replica-{os.getpid()}-{os.urandom(4).hex()}")

    async def __call__(self, request: Any) -> str:
        key = request.query_params["id"]
        self._journal.write("began", key, self._version)
        try:
            await asyncio.sleep(random.random() * RUN_S)
        finally:
            self._journal.write("ended", key, self._version)
        return f"{self._version} {key}"


def make_backends(environ: dict[str, str], folder: Path, replicas: int) -> None:
    """Make a backend of each version, and wait for its replicas. Called on a host."""
    os.environ.update(environ)
    cloudpickle.register_pickle_by_value(sys.modules["tests"])
    config = {"num_replicas": replicas, "max_ongoing_requests": LIMIT}
    with serve.Client.connect() as client:
        for version in VERSIONS:
            client.create_backend(version, Versioned, version, str(folder), config=config)
        for version in VERSIONS:
            goal = client.update_backend_config(version, config)
            client.wait_for_goal(goal, timeout_s=60)


class Clients:
    """Admin clients and HTTP clients of one host, until :meth:`stop`."""

    def __init__(self, work: Work) -> None:
        os.environ.update(work.environ)
        self._work = work
        self._ending = threading.Event()
        targets = [self._send_all, *[self._change_all] * work.changers]
        self._threads = [
            threading.Thread(target=target, args=(number,), daemon=True)
            for number, target in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Let what is under way end; return how many clients were never answered."""
        self._ending.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        return sum(thread.is_alive() for thread in self._threads)

    def _journal(self, number: int) -> Journal:
        return Journal(self._work.folder / f"clients-{self._work.name}-{number}")

    # --- Changes --------------------------------------------------------------------------------

    def _change_all(self, number: int) -> None:
        rng = random.Random(f"{self._work.seed} {self._work.name} {number}")
        changer = Changer(f"{self._work.name}-{number}", self._work.endpoints, rng)
        journal = self._journal(number)
        while not self._ending.wait(CHANGE_PAUSE_S * rng.random() * 2):
            with contextlib.suppress(GreenroomError), serve.Client.connect() as client:
                while changer.does_one(client, journal):
                    if self._ending.wait(CHANGE_PAUSE_S * rng.random() * 2):
                        return

    # --- Requests -------------------------------------------------------------------------------

    def _send_all(self, number: int) -> None:
        asyncio.run(self._send_on_connections(self._journal(number)))

    async def _send_on_connections(self, journal: Journal) -> None:
        connections = range(self._work.connections)
        await asyncio.gather(*(self._connection(journal, number) for number in connections))

    async def _connection(self, journal: Journal, number: int) -> None:
        work = self._work
        rng = random.Random(f"{work.seed} {work.name} http {number}")
        ids = (f"{work.name}-h{number}-{count}" for count in itertools.count())

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            key, endpoint = next(ids), rng.choice(work.endpoints)
            method = rng.choice(["GET", "GET", "POST"])
            journal.write("sent", key, work.host, endpoint, method)
            line = f"{method} /{endpoint}?id={key} HTTP/1.1\r\n"
            writer.write(f"{line}Host: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            async with asyncio.timeout(ANSWER_S):
                status, body, is_kept = await read_answer(reader)
            journal.write("got", key, status, body.decode()[:200])
            return is_kept

        # Of one that fails the journal says that it was not answered.
        await ask_on(
            work.port, ask, self._ending, lambda: work.pause_s * rng.random() * 2, lambda _: None
        )


class Changer:
    """Changes and reads endpoints, one operation after the other."""

    def __init__(self, name: str, endpoints: tuple[str, ...], rng: random.Random) -> None:
        self._keys: Iterator[str] = (f"{name}-{count}" for count in itertools.count())
        self._endpoints = endpoints
        self._rng = rng

    def does_one(self, client: serve.Client, journal: Journal) -> bool:
        """Do one operation; return False if the client is of no use any more."""
        key, endpoint = next(self._keys), self._rng.choice(self._endpoints)
        kind = self._rng.choice([*["create"] * 3, "delete", *["set"] * 6, *["read"] * 2])
        if kind == "read":
            return self._read(client, journal, key)
        weights = None if kind == "delete" else self._weights(is_whole=kind == "create")
        journal.write("asked", key, endpoint, kind, weights)
        try:
            if kind == "create":
                (backend,) = weights or ()
                client.create_endpoint(
                    endpoint, backend=backend, route=f"/{endpoint}", methods=("GET", "POST")
                )
            elif kind == "delete":
                client.delete_endpoint(endpoint)
            else:
                client.set_traffic(endpoint, weights or {})
        except (ConflictError, UnknownNameError):
            outcome = REFUSED
        except (GreenroomError, TimeoutError):
            return False  # it may have been done, or be done yet
        else:
            outcome = OK
        journal.write("answered", key, outcome, None)
        return True

    def _read(self, client: serve.Client, journal: Journal, key: str) -> bool:
        for endpoint in self._endpoints:
            journal.write("asked", f"{key}/{endpoint}", endpoint, "read", None)
        try:
            listed = client.list_endpoints()
        except (GreenroomError, TimeoutError):
            return False
        for endpoint in self._endpoints:
            traffic = listed.get(endpoint, {}).get("traffic")
            journal.write("answered", f"{key}/{endpoint}", OK, traffic)
        return True

    def _weights(self, *, is_whole: bool) -> dict[str, float]:
        """Return weights of one version, or such as are unlike all others, to be known again."""
        one, other = self._rng.sample(VERSIONS, 2)
        if is_whole or self._rng.random() < 0.5:
            return {one: 1.0}
        weight = self._rng.randrange(1, 1_000_000) / 1_000_000
        return {one: weight, other: round(1 - weight, 6)}


A_CHANGE = "a-change"  # and its route


def make_a_change(environ: dict[str, str]) -> None:
    """Make one that every front has to hear of; harmless when it is made. Called on a host."""
    made = CreateEndpoint.of(name=A_CHANGE, backend=VERSIONS[0], route=f"/{A_CHANGE}")
    cluster.connection(environ).request(made, timeout_s=CHANGE_S)


def take_it_back(environ: dict[str, str]) -> None:
    """Take back what :func:`make_a_change` made. Called on a host."""
    cluster.connection(environ).request(DeleteEndpoint(name=A_CHANGE), timeout_s=CHANGE_S)


_clients: Clients | None = None


def begin(work: Work) -> None:
    """Begin a round's work. Called on a host."""
    global _clients  # noqa: PLW0603  # one per process
    _clients = Clients(work)


def end() -> int:
    """End what :func:`begin` began. Called on a host."""
    assert _clients is not None
    return _clients.stop()
