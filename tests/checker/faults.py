"""What is done to the hosts in a run of the checker: each fault is done, lasts, and is undone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from tests.checker.clients import A_CHANGE, make_a_change, take_it_back
from tests.checker.histories import Journal
from tests.support.cluster import Cluster, ClusterHost

ROLES = ("proxy", "controller", "replica", "http worker", "http master", "thespian admin")
MISSED_S = 1.5  # a host that is away for longer may be lost to the others
FAULTS_AT_LEAST = 3  # of a round, however busy the machine is
HEALED_S = 60.0  # within which all is well again, whatever was done
SILENT_S = 5.0  # a process that is stopped for longer is killed

Back = Callable[[ClusterHost], None]


class Faults:
    """Makes faults one after the other, as its random numbers say.

    ``back`` makes clients for a host that has crashed and is up again.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        start: Back,
        back: Back,
        *,
        kinds: Sequence[str] = (),
        roles: Sequence[str] = (),
        healed_s: float = HEALED_S,
    ) -> None:
        self._cluster = cluster
        self._roles = roles or ROLES
        self._healed_s = healed_s
        self._kinds = [KINDS[name] for name in kinds or KINDS]
        if len(cluster.hosts) == 1:
            self._kinds = [each for each in self._kinds if each in {Faults.kill, Faults.stop}]
        self._rng = random.Random(f"faults {seed}")
        self._start, self._back = start, back
        self.spared: set[int] = set()  # the pids of clients
        self.has_healed = True
        self.trouble = ""  # that kept it from being found healed
        self._journal: Journal | None = None

    def run(self, journal: Journal, until: float, pause_s: float) -> Iterator[str]:
        """Make faults until then, some at least, unless one is not healed; yields what is done."""
        self._journal = journal
        made = 0
        while (made < FAULTS_AT_LEAST or time.monotonic() < until) and self.has_healed:
            made += 1
            time.sleep(pause_s * self._rng.random() * 2)
            yield self._rng.choice(self._kinds)(self, self._host())

    def _host(self) -> ClusterHost:
        """Choose any host, but every other time one with a controller."""
        hosts = self._cluster.hosts
        leading = [host for host in hosts if self._leads(host)]
        return self._rng.choice(leading if leading and self._rng.random() < 0.5 else hosts)

    @staticmethod
    def _leads(host: ClusterHost) -> bool:
        return "controller" in recorded(host).values()

    def heal(self) -> bool:
        """Wait until every host sees every host running; return whether that was in time.

        Then a change is made, which each host's front must know once it is acknowledged: then the
        host has heard of all before it. A host that was lost meanwhile does not know it.
        """
        labels = {host.label: "RUNNING" for host in self._cluster.hosts}
        until = time.monotonic() + self._healed_s
        self.has_healed = False
        while self.has_healed is False and time.monotonic() < until:
            hosts = self._cluster.hosts
            try:
                if all(host.hosts() == labels for host in hosts):
                    hosts[0].call(make_a_change, hosts[0].environ)
                    routes = [host.get("/-/routes")[1] for host in hosts]
                    self.has_healed = all(f"/{A_CHANGE}" in each for each in routes)
                    hosts[0].call(take_it_back, hosts[0].environ)
            except AssertionError as error:  # no controller answers there
                self.trouble = str(error)
            time.sleep(0.1)
        return self.has_healed

    # --- Processes ------------------------------------------------------------------------------

    def _some(self, host: ClusterHost) -> tuple[list[str], list[int]]:
        """Choose one role or two; return them, and the pids of one process of each."""
        roles = self._rng.sample(self._roles, min(self._rng.choice([1, 1, 2]), len(self._roles)))
        chosen = []
        for role in roles:
            pids = [pid for pid, each in recorded(host).items() if each == role]
            if pids:
                chosen += pids if self._rng.random() < 0.2 else [self._rng.choice(pids)]
        return roles, chosen

    def kill(self, host: ClusterHost) -> str:
        """Kill processes."""
        roles, pids = self._some(host)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{host.label}: killed {' and '.join(roles)}"

    def stop(self, host: ClusterHost) -> str:
        """Stop processes for a while; they are killed where it is too long."""
        roles, pids = self._some(host)
        lasts_s = self._rng.choice([0.2, 0.7, 2.0, SILENT_S + 2])
        self._signal(pids, signal.SIGSTOP)
        more = self._last(lasts_s)
        self._signal(pids, signal.SIGCONT)
        return f"{host.label}: stopped {' and '.join(roles)} for {lasts_s:g} s{more}"

    def _last(self, lasts_s: float) -> str:
        """Let a fault last; every third time something is killed meanwhile, which is returned."""
        is_alone = self._rng.random() < 2 / 3
        time.sleep(lasts_s / 2)
        more = "" if is_alone else f", and meanwhile {self.kill(self._host())}"
        time.sleep(lasts_s / 2)
        return more

    @staticmethod
    def _signal(pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # --- Hosts ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _isolated(self, *hosts: ClusterHost) -> Iterator[None]:
        begun_at = time.monotonic()
        yield
        if time.monotonic() - begun_at > MISSED_S:
            self.heal()
            ended_at = time.monotonic()
            assert self._journal is not None
            for host in hosts:
                self._journal.write(host.label, begun_at, ended_at)

    def cut(self, host: ClusterHost) -> str:
        """Cut a host off, both ways or one.

        A leader reaches the shared store all the same, and may lead on: then it is the others that
        are cut off from it.
        """
        lasts_s = self._rng.choice([0.5, 4.0, 8.0])
        sent, received = self._rng.choice([(True, True), (True, False), (False, True)])
        apart = self._cluster.hosts if self._leads(host) else [host]
        with self._isolated(*apart):
            host.link(sent={"is_cut": sent}, received={"is_cut": received})
            more = self._last(lasts_s)
            host.heal()
        ways = " and ".join(["sent"] * sent + ["received"] * received)
        return f"{host.label}: cut what is {ways} for {lasts_s:g} s{more}"

    def freeze(self, host: ClusterHost) -> str:
        """Stop all processes of a host."""
        lasts_s = self._rng.choice([0.5, 4.0, 8.0])
        pids = sorted(set(host.pids()) - self.spared - {host.pid})
        with self._isolated(host):
            self._signal(pids, signal.SIGSTOP)
            more = self._last(lasts_s)
            self._signal(pids, signal.SIGCONT)
        return f"{host.label}: frozen for {lasts_s:g} s{more}"

    def crash(self, host: ClusterHost) -> str:
        """Kill all processes of a host, and start it again."""
        lasts_s = self._rng.choice([0.0, 6.0])
        with self._isolated(host):
            host.crash()
            time.sleep(lasts_s)
            host.reboot()
            self._start(host)
        self._back(host)
        return f"{host.label}: crashed, and started {lasts_s:g} s later"


KINDS = {
    each.__name__: each
    for each in (Faults.kill, Faults.stop, Faults.cut, Faults.freeze, Faults.crash)
}


def recorded(host: ClusterHost) -> dict[int, str]:
    """Return pid -> role of the host's processes on record."""
    found = {}
    for path in (host.state_dir / "run").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(path.read_text(encoding="utf-8"))
            found[record["pid"]] = record["role"]
    return {pid: role for pid, role in found.items() if pid in set(host.pids())}
