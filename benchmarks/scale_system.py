"""What changes cost the real controller on one host, with its file store and a crowd of listeners.

``python -m benchmarks.scale_system``: a system of its own for each size, started from a store that
has so many backends, scaled to zero, so that no replica runs, and an endpoint each. A process of
many listeners speaks the long poll of other hosts' proxies: it takes the news of each and says that
it holds them, and repeats that every two seconds, as proxies do. Times are a client's, from the
request to the answer.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.running import _free_ports
from benchmarks.scale import CODE, SIZES, _records
from greenroom.actors.caller.connection import Connection
from greenroom.actors.host import launcher as system
from greenroom.actors.messages import control as cm
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.port import CONTROLLER, Finder, ThreadPort
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.config import BackendConfig
from greenroom.persistence.checkpoints import Checkpoints, code_digest
from greenroom.persistence.filesystem import FileLocation
from greenroom.serve import Client

LISTENERS = 500
ROUNDS = 20
IDLE_S = 10.0
REPEAT_S = 2.0


class Crowd:
    """So many listeners in one process; all on its port's thread.

    The first one is sent everything; the others begin where it is then, as hosts that hold it all.
    """

    def __init__(self, settings: HostSettings, count: int) -> None:
        self.port = port = ThreadPort(settings.admin_port, this_process())
        mine = port.process
        self._seen = {
            Process(mine.pid, mine.start_ticks, f"listener {secrets.token_hex(4)}"): 0
            for _ in range(count)
        }
        self._held: Future[None] = Future()
        self._controller: Any = None
        port.on(cm.Changed, self._changed)
        self._finder = Finder(port, CONTROLLER, self._found)
        port.open(30.0)
        port.loop.post(self._finder.start)

    def wait(self) -> None:
        """Wait until every listener has been sent, or has reported, what it holds."""
        self._held.result(timeout=120)

    def _found(self, address: Any, _process: Process) -> None:
        self._controller = address
        self._repeat()

    def _repeat(self) -> None:
        first = next(iter(self._seen))
        for listener in self._seen if self._held.done() else [first]:
            self._listen(listener)
        self.port.loop.call_later(REPEAT_S, self._repeat)

    def _listen(self, listener: Process) -> None:
        listen = cm.Listen(listener=listener, host="", seen=self._seen[listener])
        self.port.loop.send(self._controller, listen)

    def _changed(self, message: cm.Changed, _sender: Any) -> None:
        """Take news, which do not say for whom: each listener gets them once."""
        for listener, seen in self._seen.items():
            if seen < message.upto:
                self._seen[listener] = message.upto
                self._listen(listener)
                break
        if not self._held.done():
            self._seen = dict.fromkeys(self._seen, message.upto)
            for listener in self._seen:
                self._listen(listener)
            self._held.set_result(None)


def _write_state(settings: HostSettings, backends: int) -> None:
    """Have so many backends at zero replicas and headless endpoints on disk."""
    scaling = {"min_replicas": 0, "initial_replicas": 0}
    config = BackendConfig(autoscaling_config=scaling).model_dump()  # type: ignore[arg-type]
    records = _records(backends)
    puts: dict[tuple[str, str], Any] = {}
    for name, record in records["backend"].items():
        puts["backend", name] = replace(record, config=config, replicas=(), target=0)
    for name, record in records["endpoint"].items():
        puts["endpoint", name] = replace(record, route=None, methods=())
    store = FileLocation(settings.store_dir, "controller").open()
    Checkpoints(store).save({**puts, ("code", code_digest(CODE)): CODE})
    store.close()


def cpu_ms(pid: int) -> float:
    """Return what a process has run for on its main thread, which has all of the controller."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e6


def controller_pid(settings: HostSettings) -> int:
    """Return the pid of this host's controller."""
    records = RunRecords(settings.run_dir).alive()
    return next(process.pid for process, role in records.items() if role == "controller")


class _Meter:
    """What changes cost: until the answer, and of the controller's CPU."""

    def __init__(self, pid: int, rounds: int) -> None:
        self.figures: dict[str, float] = {}
        self._pid = pid
        self._rounds = rounds

    def measure(
        self,
        what: str,
        call: Callable[[int], Any],
        finish: Callable[[Any], None] = lambda _answer: None,
    ) -> None:
        """Make a change so many times; ``finish`` gets its answer, and does not count."""
        times, cpu = [], []
        for number in range(self._rounds):
            used, began = cpu_ms(self._pid), time.perf_counter()
            answer = call(number)
            times.append((time.perf_counter() - began) * 1e3)
            cpu.append(cpu_ms(self._pid) - used)
            finish(answer)
        self.figures[what] = statistics.median(times)
        self.figures[f"{what}: the controller's CPU"] = statistics.median(cpu)

    def rest(self) -> None:
        """Measure what it costs to be idle."""
        used = cpu_ms(self._pid)
        time.sleep(IDLE_S)  # what is measured is what is spent meanwhile
        self.figures["a second of rest: its CPU"] = (cpu_ms(self._pid) - used) / IDLE_S


def _measure(client: Client, settings: HostSettings, rounds: int) -> dict[str, float]:
    splits = [{"b0": 0.5, "b1": 0.5}, {"b0": 1.0}]
    meter = _Meter(controller_pid(settings), rounds)
    meter.measure("set_traffic", lambda n: client.set_traffic("e0", splits[n % 2]))
    meter.measure(
        "update_backend_config",
        lambda n: client.update_backend_config("b1", {"max_queued_requests": n + 1}),
        lambda goal: client.wait_for_goal(goal, 60),
    )
    meter.measure("create_endpoint", lambda n: client.create_endpoint(f"n{n}", backend="b2"))
    meter.measure("delete_endpoint", lambda n: client.delete_endpoint(f"n{n}"))
    meter.rest()
    return meter.figures


def measure(backends: int, listeners: int, rounds: int) -> dict[str, float]:
    """Return what each thing costs at a size, in milliseconds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    http_port, admin_port = _free_ports(2)
    settings = read_settings(
        {
            "GREENROOM_STATE_DIR": str(folder / "state"),
            "GREENROOM_HTTP_PORT": str(http_port),
            "GREENROOM_ADMIN_PORT": str(admin_port),
        }
    )
    try:
        _write_state(settings, backends)
        began = time.perf_counter()
        system.start(settings)
        start_ms = (time.perf_counter() - began) * 1e3
        crowd = Crowd(settings, listeners)
        crowd.wait()
        with Client(Connection.open(settings), settings) as client:
            figures = _measure(client, settings, rounds)
        crowd.port.close()
        return {**figures, "start, recovery included": start_ms}
    finally:
        system.stop(settings)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_system", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--listeners", type=int, default=LISTENERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    by_size = {size: measure(size, options.listeners, options.rounds) for size in options.sizes}
    print(f"{options.listeners} listeners; {report.machine()}")
    print(report.by_size(by_size))


if __name__ == "__main__":
    main()
