"""What models do, beside the peers: `python -m benchmarks.models --peers mosec,litserve`.

A batched numpy model with 64 connections, in batches of up to 32; and streams of 200 tokens to 64
clients at once. In each round every system is started, measured and ended; the next round begins
with another one.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, replace
from statistics import median

from benchmarks import BenchmarkError
from benchmarks.http import in_turn
from benchmarks.loads import load, require_wrk
from benchmarks.options import parser, positive, run_main
from benchmarks.report import machine, write_json
from benchmarks.requests import result_table
from benchmarks.running import FAILURES, Running
from benchmarks.systems import GREENROOM, LITSERVE, MOSEC, System
from benchmarks.venvs import Venv, prepare_greenroom, prepare_peer

CLIENTS, TOKENS = 64, 200
TIMEOUT_S = 60
BATCHING, STREAMS = "/batching", "/tokens"
REQUEST = (
    b"POST /tokens HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 30\r\nConnection: close\r\n\r\n{"name": "tokens", "value": 1}'
)


@dataclass(frozen=True, slots=True)
class Part:
    """One start of a system, and which of the paths it has then."""

    system: System
    paths: tuple[str, ...]


def _models(system: System, name: str, command: tuple[str, ...], path: str = BATCHING) -> System:
    return replace(
        system,
        name=name,
        requirements=(*system.requirements, "numpy"),
        command=command,
        echo_path=path,
        alive_path=path,
    )


OURS = [
    Part(
        _models(
            GREENROOM, "greenroom-models", ("{bin}/python", "{apps}/greenroom_models.py", "{port}")
        ),
        (BATCHING, STREAMS),
    )
]
_LITSERVE = ("{bin}/python", "{apps}/litserve_models.py", "{port}")
PEERS = {
    "mosec": [
        Part(
            _models(
                MOSEC,
                "mosec-models",
                (
                    *(word.replace("mosec_app", "mosec_models") for word in MOSEC.command),
                    "--timeout",  # of a request, in ms: it makes one stream after the other
                    str(TIMEOUT_S * 1000),
                ),
            ),
            (BATCHING, STREAMS),
        )
    ],
    "litserve": [
        Part(_models(LITSERVE, "litserve-models", _LITSERVE), (BATCHING,)),
        Part(_models(LITSERVE, "litserve-models", (*_LITSERVE, "--tokens"), STREAMS), (STREAMS,)),
    ],
}


async def _stream(port: int) -> tuple[float, int]:
    """Read one stream; return after how many seconds its first token came, and how many came."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    first_s, tokens, is_good = 0.0, 0, False
    while received := await reader.read(65536):
        is_good = is_good or received.startswith(b"HTTP/1.1 200")
        found = received.count(b"token")
        if found and not tokens:
            first_s = time.perf_counter() - began
        tokens += found
    writer.close()
    if not is_good or tokens != TOKENS:
        raise BenchmarkError(f"a stream had {tokens} tokens, not {TOKENS}, or no status 200")
    return first_s, tokens


async def _streams(port: int, seconds: float) -> dict[str, float]:
    firsts: list[float] = []
    ends_at = time.perf_counter() + seconds

    async def client() -> int:
        total = 0
        while time.perf_counter() < ends_at:
            first_s, tokens = await _stream(port)
            firsts.append(first_s)
            total += tokens
        return total

    began = time.perf_counter()
    counts = await asyncio.wait_for(asyncio.gather(*(client() for _ in range(CLIENTS))), TIMEOUT_S)
    return {
        f"{CLIENTS} streams of {TOKENS} tokens, tokens/s": sum(counts)
        / (time.perf_counter() - began),
        "first token, p50, ms": median(firsts) * 1000,
    }


def measure(part: Part, venv: Venv, seconds: int) -> dict[str, float]:
    """Start one system, ask what it has, end it."""
    found: dict[str, float] = {}
    with Running(part.system, venv) as running:
        if BATCHING in part.paths:
            url = f"http://127.0.0.1:{running.port}{BATCHING}"
            load(url, connections=64, seconds=1)
            counted = load(url, connections=64, seconds=seconds)
            if counted["non_2xx"] or counted["socket_errors"]:
                raise BenchmarkError(f"{part.system.name}: batching failed: {counted}")
            found["batches of up to 32, 64 connections, requests/s"] = counted["requests_per_s"]
            found["batches, p50, ms"] = counted["p50_ms"]
            found["batches, p99, ms"] = counted["p99_ms"]
        if STREAMS in part.paths:
            asyncio.run(_streams(running.port, 1))
            found |= asyncio.run(_streams(running.port, seconds))
    return found


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no peer is called {name!r}: {', '.join(PEERS)}")
    return names


def main() -> int:
    options_parser = parser("models", __doc__.splitlines()[0], peers=_peers)
    options_parser.add_argument("--rounds", type=positive, default=3)
    options_parser.add_argument("--seconds", type=positive, default=3, help="of each load")
    options = options_parser.parse_args()
    require_wrk()
    root = options.venvs.absolute()
    root.mkdir(parents=True, exist_ok=True)
    systems = {"greenroom": OURS} | {name: PEERS[name] for name in options.peers}
    venvs = {"greenroom": prepare_greenroom(root, OURS[0].system)}
    venvs |= {name: prepare_peer(PEERS[name][0].system, root) for name in options.peers}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    failures = []
    for number in range(options.rounds):
        for name in in_turn(venvs, number):
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            try:
                found = [measure(part, venvs[name], options.seconds) for part in systems[name]]
            except (TimeoutError, *FAILURES) as error:
                failures.append(f"round {number + 1}: {name}: {error}")
            else:
                rounds[name].append({row: value for part in found for row, value in part.items()})
    print(result_table(rounds))
    write_json(options.json, {"machine": machine(), "systems": rounds, "failures": failures})
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
