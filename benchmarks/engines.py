"""Tokens per second of llama.cpp's server alone, and behind Greenroom, from one run.

    python -m benchmarks.engines --rounds 5

The model has random weights and about 20 million parameters: 100 to 200 tokens per second on one
thread, as large models have on GPUs. Clients read streams, each for itself.
"""

import argparse
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.own_system import own_system
from benchmarks.report import table
from greenroom import serve
from tests.support import llama

TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", default="1,4")
    parser.add_argument("--per-client", type=int, default=4)
    given = parser.parse_args()
    clients = [int(each) for each in given.clients.split(",")]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model = Path(folder) / "model.gguf"
        llama.write_model(model, width=512, layers=8)
        command = (
            f"{shlex.join([sys.executable, llama.__file__])} --model {model} --alias m --port "
        )
        with own_system() as port:
            serve.run(serve.Engine(command + "{port}", max_ongoing_requests=64).bind(), name="m")
            with socket.create_server(("127.0.0.1", 0)) as drawn:
                alone = drawn.getsockname()[1]
            with open(os.devnull, "wb") as nowhere:
                engine = subprocess.Popen(
                    [*shlex.split(command), str(alone)], stdout=nowhere, stderr=nowhere
                )
            try:
                _wait_for(alone)
                rates = {(way, count): [] for way in ("alone", "greenroom") for count in clients}
                for _ in range(given.rounds):
                    for count in clients:
                        for way, at in (("alone", alone), ("greenroom", port)):
                            rates[way, count].append(_rate(at, count, given.per_client))
            finally:
                engine.kill()
                engine.wait()
    rows = []
    for count in clients:
        own, ours = median(rates["alone", count]), median(rates["greenroom", count])
        rows.append([str(count), f"{own:.0f}", f"{ours:.0f}", f"{ours / own:.3f}"])
    print(table(["clients", "tokens/s alone", "behind Greenroom", "ratio"], rows))


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _rate(port: int, clients: int, per_client: int) -> float:
    """Return how many tokens per second these clients get together."""
    began_at = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(lambda _: _read(port, per_client), range(clients)))
    return tokens / (time.monotonic() - began_at)


def _read(port: int, times: int) -> int:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "logit_bias": [[2, False]],  # it never ends by itself
        }
    )
    parts = 0
    for _ in range(times):  # llama.cpp closes a connection behind a stream
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request(
            "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        parts += sum(b'"content":"' in line for line in answer)
        connection.close()
    return parts


if __name__ == "__main__":
    main()
