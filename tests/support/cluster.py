"""Greenroom on several hosts of one machine: namespaces around a switch, each with its system."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import string
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime.processes import command_line
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import GreenroomError
from greenroom.core.operations import GetStatus
from tests.support import logs, switch, template
from tests.support.asking import ask
from tests.support.load import GetLoad, Tally
from tests.support.namespaces import Host, forks, run_ip
from tests.support.programs import cannot_run
from tests.support.systems import wait_until

NETWORK = "10.77.0"
HTTP_PORT = 8000
_numbers = itertools.count(1)


def run_afresh(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of the release that PYTHONPATH names. Called on a host."""
    return template.afresh(*args, environ=environ)


def get(path: str, token: str = "") -> tuple[int, str]:
    """GET a path of the host's own front. Called on a host."""
    headers = [("authorization", f"Bearer {token}")] if token else []
    got = ask(f"http://127.0.0.1:{HTTP_PORT}{path}", headers=headers)
    return got.status, got.body.decode()


def listening() -> list[tuple[str, str]]:
    """Return ("tcp" or "udp", address) of all that listens on a host. Called on a host."""
    listed = subprocess.run(
        ["ss", "-ltunH"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [(line.split()[0], line.split()[4]) for line in listed]


_connection: Connection | None = None


def connection(environ: dict[str, str]) -> Connection:
    """Return a connection that stays. Called on a host."""
    global _connection  # noqa: PLW0603  # one per process
    if _connection is None:
        _connection = Connection.open(read_settings(environ))
    return _connection


def read_status(environ: dict[str, str]) -> dict[str, Any]:
    """Return what status tells. Called on a host."""
    global _connection  # noqa: PLW0603  # one per process
    for _ in range(2):
        try:
            return connection(environ).request(GetStatus(), timeout_s=10)  # type: ignore[no-any-return]
        except (GreenroomError, TimeoutError):  # of a system that has ended meanwhile
            connection(environ).close()
            _connection = None
    raise AssertionError("the controller does not answer")


_load: GetLoad | None = None


def begin_load(path: str, connections: int, pause_s: float) -> None:
    """GET a path over and over. Called on a host."""
    global _load  # noqa: PLW0603  # one per process
    _load = GetLoad(HTTP_PORT, path, connections, pause_s)
    _load.__enter__()


def end_load() -> Tally:
    """End what :func:`begin_load` began. Called on a host."""
    assert _load is not None
    return _load.stop()


class ClusterHost(Host):
    """One host with its state dir."""

    def __init__(self, cluster: Cluster, number: int, name: str) -> None:
        self.cluster, self.number = cluster, number
        self.label = string.ascii_lowercase[number]
        self.leads = number < cluster.leaders
        self.state_dir = cluster.folder / self.label
        logs.begin(self.state_dir / "logs")
        super().__init__(name, f"{NETWORK}.{number + 1}")
        self._loads: Host | None = None  # what makes requests, once there is a load

    @property
    def environ(self) -> dict[str, str]:
        return {
            "GREENROOM_STATE_DIR": str(self.state_dir),
            "GREENROOM_HOST_NAME": self.label,
            "GREENROOM_HTTP_PORT": str(HTTP_PORT),
            "PYTHONPATH": str(self.cluster.folder),
        }

    def run(self, *args: str, **environ: str) -> tuple[int, str, str]:
        """Run ``greenroom``, of another release if given its PYTHONPATH.

        Returns exit code, stdout, stderr.
        """
        every = {**self.environ, **environ}
        if "PYTHONPATH" in environ:
            done = self.call(run_afresh, every, *args)
        else:
            done = template.greenroom(*args, environ=every, namespace=self.name)
        return done.returncode, done.stdout, done.stderr

    def check(self, *args: str, **environ: str) -> str:
        """Run ``greenroom``, which must succeed; returns stdout."""
        code, out, err = self.run(*args, **environ)
        assert code == 0, f"{args} on {self.label}: {err}{out}\n{self.log('host.log')}"
        return out

    def start(self, *flags: str, key_file: Path | None = None, **environ: str) -> str:
        """Start its system: the first host leads, the others join it."""
        args = ["start", "--bind", self.address, *flags]
        store = self.cluster.store or (self.leads and self.cluster.make_shared())
        if store:
            args += ["--store", str(store)]
            args += ["--key-file", str(key_file or self.cluster.make_key())]
        elif self.number:
            key_file = key_file or self.cluster.hosts[0].state_dir / "cluster.key"
            leaders = range(max(self.cluster.leaders, 1))
            join = ",".join(f"{NETWORK}.{n + 1}:1900" for n in leaders)
            args += ["--join", join, "--key-file", str(key_file)]
        return self.check(*args, **environ)

    def log(self, name: str) -> str:
        """Return a log's text, "" when there is none."""
        path = self.state_dir / "logs" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self) -> dict[str, Any]:
        """Return what status prints here."""
        return self.call(read_status, self.environ)  # type: ignore[no-any-return]

    def hosts(self) -> dict[str, str]:
        """Return the state of every host, as status tells it here."""
        return {host["name"]: host["state"] for host in self.status()["hosts"]}

    def replicas(self, backend: str, state: str = "RUNNING") -> dict[str, str]:
        """Return replica -> host of those in a state, as status tells it here."""
        shown = self.status()["backends"].get(backend, {"replicas": ()})
        return {r["tag"]: r["host"] for r in shown["replicas"] if r["state"] == state}

    def get(self, path: str = "/", token: str = "") -> tuple[int, str]:
        """GET a path of its own front."""
        return self.call(get, path, token)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def load(
        self, path: str = "/", connections: int = 32, pause_s: float = 0.02
    ) -> Iterator[Callable[[], Tally]]:
        """GET a path of its front meanwhile; yields a function that ends this and counts."""
        self._loads = loads = self._loads or self.another()
        loads.call(begin_load, path, connections, pause_s)
        yield lambda: loads.call(end_load)

    def crash(self) -> None:
        """End all of its processes at once, as a crash of the machine would."""
        self.kill()

    def freeze(self) -> Callable[[], None]:
        """SIGSTOP all but what calls for the test; returns what undoes it."""
        ours = {each.pid for each in (self, self._loads) if each is not None}
        pids = set(self.pids()) - ours
        self._signal(pids, signal.SIGSTOP)
        return lambda: self._signal(pids, signal.SIGCONT)

    def reboot(self) -> None:
        """Start it again after a crash, with nothing running."""
        self.boot()
        self._loads = None
        self.call(os.getpid)  # the process that calls for the test is up

    def link(self, *, sent: dict[str, Any] | None = None, received: Any = None) -> None:
        """Change what its link does to frames: ``is_cut``, ``loss``, ``delay_s``."""
        for way, changes in (("sent", sent), ("received", received)):
            if changes is not None:
                self.cluster.switch("change", self.number, way, changes)

    def cut(self) -> None:
        """Cut its link, both ways and without a word."""
        self.link(sent={"is_cut": True}, received={"is_cut": True})

    def part(
        self, *others: ClusterHost, sent: bool = True, received: bool = True
    ) -> Callable[[], None]:
        """Drop what it sends to some hosts, and what those send to it; returns what undoes it."""
        pairs = [(self.number, other.number) for other in others if sent]
        pairs += [(other.number, self.number) for other in others if received]

        def change(is_cut: bool) -> None:
            for pair in pairs:
                self.cluster.switch("part", *pair, is_cut)

        change(True)
        return lambda: change(False)

    def heal(self) -> None:
        """Let its link pass all frames again."""
        plain = {"is_cut": False, "loss": 0.0, "delay_s": 0.0}
        self.link(sent=plain, received=plain)


class Cluster:
    """Hosts around a switch; use :func:`cluster_of`."""

    def __init__(self, folder: Path, leaders: int = 0) -> None:
        self.folder = folder
        self.leaders = leaders  # so many of the first hosts may lead; they share a folder
        self.store = ""  # the URL of the database that they share
        self.stem = f"greenroom-{os.getpid()}-{next(_numbers)}"
        self.hosts: list[ClusterHost] = []
        self._namespaces: list[str] = []
        self._process: Any = None

    def make(self, count: int) -> None:
        """Make the hosts and what is between them."""
        middle = self._namespace("switch")
        for number in range(count):
            name = self._namespace(string.ascii_lowercase[number])
            run_ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name",
                   f"port{number}", "netns", middle)  # fmt: skip
            address = f"{NETWORK}.{number + 1}/24"
            run_ip("-n", name, "addr", "add", address, "dev", "cable")
            run_ip("-n", middle, "link", "set", f"port{number}", "up")
            for link in ("cable", "lo"):
                run_ip("-n", name, "link", "set", link, "up")
        self._pipe, pipe = forks.Pipe()
        ports = [f"port{number}" for number in range(count)]
        self._process = forks.Process(target=switch.serve, args=(pipe, middle, ports))
        self._process.start()
        pipe.close()
        self._pipe.recv()
        for number in range(count):
            self.hosts.append(ClusterHost(self, number, self._namespaces[number + 1]))
        for host in self.hosts:  # whose processes have begun at once
            host.call(switch.send_plain_frames, "cable")

    def switch(self, method: str, *args: Any) -> Any:
        """Call a method of the switch."""
        self._pipe.send((method, args))
        return self._pipe.recv()

    def start(self, **environ: str) -> None:
        """Start the system of every host: the first one, then the others at once."""
        first, *others = self.hosts
        first.start(**environ)
        with ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(lambda host: host.start(**environ), others))

    def make_shared(self) -> Path:
        """Return the folder with the store that hosts share, made at the first call."""
        path = self.folder / "shared"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def make_key(self) -> Path:
        """Return the cluster file, made at the first call."""
        path = self.folder / "cluster.key"
        if not path.exists():
            self.hosts[0].check("keygen", str(path))
        return path

    def deploy(self, text: str, target: str = "app", **environ: str) -> None:
        """Deploy a module of this text from the first host."""
        (self.folder / f"{target}.py").write_text(text, encoding="utf-8")
        self.hosts[0].check("deploy", f"{target}:app", "--app-dir", str(self.folder), **environ)

    def delete(self) -> None:
        """Leave nothing."""
        for host in self.hosts:
            logs.end(host.state_dir / "logs")
            host.delete()
        if self._process is not None:
            self._pipe.close()
            self._process.join(10)
        for name in set(self._namespaces) - {host.name for host in self.hosts}:
            run_ip("netns", "delete", name)

    def _namespace(self, what: str) -> str:
        name = f"{self.stem}{what}"
        run_ip("netns", "add", name)
        self._namespaces.append(name)
        return name

    def wait_for(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Poll a condition; the logs of all hosts are in the failure."""
        try:
            return wait_until(condition, timeout_s, what)
        except AssertionError as error:
            found = "\n".join(f"--- {h.label}\n{h.log('host.log')[-2000:]}" for h in self.hosts)
            raise AssertionError(f"{error}\n{found}") from None


@contextlib.contextmanager
def cluster_of(count: int, folder: Path, leaders: int = 0) -> Iterator[Cluster]:
    """Make hosts a, b, c ...; skip where that cannot be done, but fail in CI."""
    cluster = Cluster(folder, leaders)
    try:
        try:
            cluster.make(count)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or error
            cannot_run(f"network namespaces cannot be made here: {why}")
        yield cluster
    finally:
        cluster.delete()


def controllers(cluster: Cluster) -> list[str]:
    """Return the host of every process that is a controller."""
    return [
        host.label
        for host in cluster.hosts
        for pid in host.pids()
        if command_line(pid).startswith("greenroom: controller")
    ]
