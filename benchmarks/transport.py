"""Measure the transport message by message: ``python -m benchmarks.transport``.

Each run is a process of its own; the best of each figure counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from thespian.actors import Actor, ActorExitRequest, ActorSystem

from greenroom.actors.transport.thespian_base import install

ASK_S = 120
MEGABYTE = 1024 * 1024
FIGURES = {
    "start": ("start of the system", "ms"),
    "create": ("create an actor", "ms"),
    "ask": ("ask, round trip", "us"),
    "one_way": ("one way, pipelined", "messages/s"),
    "sender_cpu": ("  CPU of the sender", "us/message"),
    "receiver_cpu": ("  CPU of the receiver", "us/message"),
    "fan_out": ("10,000 messages to 50 actors", "ms"),
    "echo_1": ("1 MB there and back", "ms"),
    "echo_10": ("10 MB there and back", "ms"),
    "echo_100": ("100 MB there and back", "ms"),
    "beside": ("  slowest ask of others meanwhile", "ms"),
    "memory": ("  memory of its receiver", "by its size"),
}
MORE_IS_BETTER = {"one_way"}


class Echo(Actor):
    """Sends back what it gets."""

    def receiveMessage(self, message: Any, sender: Any) -> None:
        if not isinstance(message, ActorExitRequest):
            self.send(sender, message)


class Counter(Actor):
    """Counts to a number; then tells who asked for it, with the CPU time that took."""

    def receiveMessage(self, message: Any, sender: Any) -> None:
        if isinstance(message, int):
            self.left -= 1
            if not self.left:
                self.send(self.asker, time.process_time() - self.cpu)
        elif isinstance(message, tuple):
            self.left, self.asker = message[1], sender
            self.cpu = time.process_time()
            self.send(sender, "ready")


class Source(Actor):
    """Sends numbers to targets, some per turn, and says what CPU time that took."""

    def receiveMessage(self, message: Any, sender: Any) -> None:
        if isinstance(message, tuple) and message[0] == "send":
            _, self.targets, self.left, self.batch = message
            self.asker, self.cpu = sender, time.process_time()
            self.send(self.myAddress, "more")
        elif message == "more":
            for number in range(min(self.left, self.batch)):
                self.send(self.targets[number % len(self.targets)], number)
            self.left -= self.batch
            if self.left > 0:
                self.send(self.myAddress, "more")
            else:
                self.send(self.asker, ("sent", time.process_time() - self.cpu))


class Sink(Actor):
    """Takes bodies, and tells its own memory: before, or the most there was."""

    def receiveMessage(self, message: Any, sender: Any) -> None:
        if isinstance(message, str):
            with open("/proc/self/status") as status:
                lines = dict(line.split(":", 1) for line in status)
            self.send(sender, int(lines[message].split()[0]) * 1024)
        elif isinstance(message, tuple):
            asker, body = message
            self.send(asker, ("taken", len(body)))


class BodySource(Actor):
    """Sends a body as long as it is asked to."""

    def receiveMessage(self, message: Any, sender: Any) -> None:
        if isinstance(message, tuple):
            sink, size = message
            self.send(sink, (sender, bytes(range(256)) * (size // 256)))


def measure(port: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    since = time.perf_counter()
    system = ActorSystem(install(), {"Admin Port": port}, logDefs={"version": 1})
    figures["start"] = (time.perf_counter() - since) * 1e3
    try:
        _measure_latency(system, figures)
        _measure_throughput(system, figures)
        _measure_fan_out(system, figures)
        echo = system.createActor(Echo)
        for size, times in ((1, 20), (10, 5), (100, 1)):
            body = bytes(size * MEGABYTE)
            figures[f"echo_{size}"] = _time_each(lambda b=body: _ask(system, echo, b), times) * 1e3
        _measure_beside(system, figures)
    finally:
        system.shutdown()
    return figures


def _measure_latency(system: ActorSystem, figures: dict[str, float]) -> None:
    figures["create"] = _time_each(lambda: system.createActor(Echo), 10) * 1e3
    echo = system.createActor(Echo)
    _ask(system, echo, 0)
    figures["ask"] = min(_time_each(lambda: _ask(system, echo, 1), 1000) for _ in range(3)) * 1e6


def _measure_throughput(system: ActorSystem, figures: dict[str, float]) -> None:
    number = 20_000
    source, counter = system.createActor(Source), system.createActor(Counter)
    seconds, sender_cpu, receiver_cpu = _flood(system, source, [counter], number)
    figures["one_way"] = number / seconds
    figures["sender_cpu"] = sender_cpu / number * 1e6
    figures["receiver_cpu"] = receiver_cpu / number * 1e6


def _measure_fan_out(system: ActorSystem, figures: dict[str, float]) -> None:
    source = system.createActor(Source)
    counters = [system.createActor(Counter) for _ in range(50)]
    figures["fan_out"] = _flood(system, source, counters, 10_000)[0] * 1e3
    for actor in (source, *counters):
        system.tell(actor, ActorExitRequest())


def _measure_beside(system: ActorSystem, figures: dict[str, float]) -> None:
    size, worst, taken = 100 * MEGABYTE, 0.0, None
    source, sink, echo = (system.createActor(each) for each in (BodySource, Sink, Echo))
    before = _ask(system, sink, "VmRSS")
    _ask(system, echo, 0)
    with system.private() as answers:
        answers.tell(source, (sink, size))
        while taken is None:
            since = time.perf_counter()
            _ask(system, echo, 1)
            worst = max(worst, time.perf_counter() - since)
            taken = answers.listen(0.001)
    assert taken == ("taken", size), taken
    figures["beside"] = worst * 1e3
    figures["memory"] = (_ask(system, sink, "VmHWM") - before) / size


def _flood(
    system: ActorSystem, source: Any, counters: list[Any], number: int
) -> tuple[float, float, float]:
    """Return the seconds until all arrived, and the CPU seconds of the source and a counter."""
    share = number // len(counters)
    with system.private() as answers, system.private() as other:
        for counter in counters:
            assert answers.ask(counter, ("count", share), ASK_S) == "ready"
        since = time.perf_counter()
        other.tell(source, ("send", counters, number, 100))
        cpus = [answers.listen(ASK_S) for _ in counters]
        seconds = time.perf_counter() - since
        assert None not in cpus, "not all arrived"
        return seconds, other.listen(ASK_S)[1], cpus[0]


def _ask(system: ActorSystem, actor: Any, message: Any) -> Any:
    answer = system.ask(actor, message, ASK_S)
    assert answer is not None, "no answer"
    return answer


def _time_each(action: Callable[[], Any], times: int) -> float:
    since = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - since) / times


def _measured_apart(port: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.transport", "--measure", "--port", str(port)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="only once, here, as JSON")
    parser.add_argument("--port", type=int, default=21700)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.port)))
        return
    best: dict[str, float] = {}
    for run in range(options.runs):
        for name, value in _measured_apart(options.port + run).items():
            better = max if name in MORE_IS_BETTER else min
            best[name] = better(value, best.get(name, value))
    for name, (label, unit) in FIGURES.items():
        print(f"{label:32}{best[name]:>10.4g}  {unit}")


if __name__ == "__main__":
    main()
