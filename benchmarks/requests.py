"""What a request can be, beside the peers: `python -m benchmarks.requests --peers ray,bentoml`.

Streams of 10,000 parts, bodies of 1 and 10 MB sent and sent back, a FastAPI app, a batched numpy
model, and a chain of three deployments. In each round every system is started, measured in all of
them and ended; the next round begins with another system.
"""

import argparse
import http.client
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import BenchmarkError
from benchmarks.http import in_turn
from benchmarks.loads import load, require_wrk
from benchmarks.options import parser, positive, run_main
from benchmarks.report import machine, table, write_json
from benchmarks.running import FAILURES, Running
from benchmarks.systems import BENTOML, GREENROOM, RAY, System
from benchmarks.venvs import Venv, prepare_greenroom, prepare_peer

MB = 1_000_000
CHUNKS, CHUNK_BYTES = 10_000, 100
SENDERS = 4  # clients that send large bodies at once
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where a system has what is asked for; the stream's also by which method and body."""

    fastapi: str
    bodies: str
    batching: str
    chain: str
    stream: tuple[str, str, str | None]


SERVE_PATHS = Paths(
    fastapi="/fastapi/echo",
    bodies="/bodies",
    batching="/batching",
    chain="/chain",
    stream=("GET", f"/stream?chunks={CHUNKS}&size={CHUNK_BYTES}", None),
)
BENTOML_PATHS = Paths(
    fastapi="/fastapi/echo",
    bodies="/fastapi/bodies",
    batching="/batching",
    chain="/chain",
    stream=("POST", "/stream", f'{{"chunks": {CHUNKS}, "size": {CHUNK_BYTES}}}'),
)
SERVE_COMMAND = ("{bin}/python", "{apps}/serve_requests.py")
OURS = replace(
    GREENROOM,
    name="greenroom-requests",
    requirements=("fastapi", "numpy", "uvloop"),
    command=(*SERVE_COMMAND, "greenroom", "{port}"),
    echo_path="/fastapi/echo",
)
PEERS: dict[str, System] = {
    "ray": replace(
        RAY,
        name="ray-requests",
        requirements=(*RAY.requirements, "numpy"),
        command=(*SERVE_COMMAND, "ray", "{port}"),
        echo_path="/fastapi/echo",
    ),
    "bentoml": replace(
        BENTOML,
        name="bentoml-requests",
        requirements=(*BENTOML.requirements, "fastapi", "numpy"),
        command=tuple(
            "bentoml_requests:First" if word == "bentoml_app:Echo" else word
            for word in BENTOML.command
        ),
        echo_path="/fastapi/echo",
    ),
}


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)


def stream(port: int, paths: Paths) -> dict[str, float]:
    """Read one stream; return parts per second, and when the first byte was there."""
    connection = connect(port)
    method, path, body = paths.stream
    began = time.perf_counter()
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    size = len(response.read1(65536))
    first_byte_s = time.perf_counter() - began
    while part := response.read1(65536):
        size += len(part)
    took_s = time.perf_counter() - began
    connection.close()
    if response.status != 200 or size < CHUNKS * CHUNK_BYTES:
        raise BenchmarkError(f"the stream ended with status {response.status} at {size} bytes")
    return {"stream, parts/s": CHUNKS / took_s, "stream, first byte, ms": first_byte_s * 1000}


def echo_bodies(port: int, path: str, size: int, seconds: float) -> float:
    """Send bodies back and forth over SENDERS connections; return megabytes per second one way."""
    body = b"x" * size
    ends_at = time.perf_counter() + seconds

    def send(_: int) -> int:
        connection = connect(port)
        count = 0
        while time.perf_counter() < ends_at:
            connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
            response = connection.getresponse()
            if response.status != 200 or len(response.read()) != size:
                raise BenchmarkError(f"{path} answered {response.status}, or not the whole body")
            count += 1
        connection.close()
        return count

    began = time.perf_counter()
    with ThreadPoolExecutor(SENDERS) as pool:
        count = sum(pool.map(send, range(SENDERS)))
    return count * size / MB / (time.perf_counter() - began)


def measure(system: System, venv: Venv, paths: Paths, seconds: int) -> dict[str, float]:
    """Start one system, ask everything of it, end it."""
    found: dict[str, float] = {}
    with Running(system, venv) as running:
        port = running.port
        for connections, name in ((16, "fastapi"), (64, "batching"), (16, "chain")):
            url = f"http://127.0.0.1:{port}{getattr(paths, name)}"
            load(url, connections=connections, seconds=1)
            counted = load(url, connections=connections, seconds=seconds)
            failed = counted["non_2xx"] + counted["socket_errors"]
            if failed > counted["requests"] / 10:
                raise BenchmarkError(f"{system.name}: {name} failed: {counted}")
            if failed:
                print(f"{system.name}: {name}: {failed} requests failed", file=sys.stderr)
            found[f"{name}, {connections} connections, requests/s"] = counted["requests_per_s"]
            found[f"{name}, p99, ms"] = counted["p99_ms"]
        stream(port, paths)
        streams = [stream(port, paths) for _ in range(3)]
        found |= {key: median(each[key] for each in streams) for key in streams[0]}
        for megabytes in (1, 10):
            echo_bodies(port, paths.bodies, megabytes * MB, 0.5)
            rate = echo_bodies(port, paths.bodies, megabytes * MB, seconds)
            found[f"bodies of {megabytes} MB, there and back, MB/s"] = rate
    return found


def result_table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """Lay out medians over rounds, with Greenroom's ratio: above 1 is better, whatever the row."""
    names = [name for name, measured in rounds.items() if measured]
    rows = []
    for row in rounds[names[0]][0]:
        medians = {name: median(each[row] for each in rounds[name]) for name in names}
        cells = [f"{medians[name]:.4g}" for name in names]
        for name in names[1:]:
            ratio = medians[names[0]] / medians[name]
            cells.append(f"{1 / ratio if row.endswith(' ms') else ratio:.2f}x")
        rows.append((row, *cells))
    return table(("", *names, *(f"beside {name}" for name in names[1:])), rows)


def _peers(text: str) -> list[System]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no peer is called {name!r}: {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def prepare(root: Path, peers: list[System]) -> dict[System, Venv]:
    root.mkdir(parents=True, exist_ok=True)
    return {OURS: prepare_greenroom(root, OURS)} | {p: prepare_peer(p, root) for p in peers}


def main() -> int:
    options_parser = parser("requests", __doc__.splitlines()[0], peers=_peers)
    options_parser.add_argument("--rounds", type=positive, default=3)
    options_parser.add_argument("--seconds", type=positive, default=3, help="of each load")
    options = options_parser.parse_args()
    require_wrk()
    venvs = prepare(options.venvs.absolute(), options.peers)
    rounds: dict[str, list[dict[str, float]]] = {system.name: [] for system in venvs}
    failures = []
    for number in range(options.rounds):
        for system in in_turn(venvs, number):
            print(f"round {number + 1} of {options.rounds}: {system.name}", file=sys.stderr)
            paths = BENTOML_PATHS if system is PEERS["bentoml"] else SERVE_PATHS
            try:
                found = measure(system, venvs[system], paths, options.seconds)
            except FAILURES as error:
                failures.append(f"round {number + 1}: {system.name}: {error}")
            else:
                rounds[system.name].append(found)
    print(result_table(rounds))
    write_json(options.json, {"machine": machine(), "systems": rounds, "failures": failures})
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
