"""Hosts that share a database, each on a machine of its own: namespaces, as in cluster.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from tests.support.cluster import Cluster, ClusterHost, cluster_of
from tests.support.postgres import PostgresServer, postgres_folder, postgres_server
from tests.support.systems import free_port, wait_until

RUNNING = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}
CALL_TIMEOUT_S = 2


def run_sql(url: str, sql: str) -> list[Any]:
    """Run a statement. Called on a host."""
    with psycopg.connect(url, connect_timeout=CALL_TIMEOUT_S, autocommit=True) as connection:
        cursor = connection.execute(sql)  # type: ignore[call-overload]
        return list(cursor.fetchall()) if cursor.description else []


def answers(url: str) -> bool:
    """Return whether a database does. Called on a host."""
    with contextlib.suppress(psycopg.OperationalError):
        run_sql(url, "SELECT 1")
        return True
    return False


class SharedDatabase:
    """Hosts a, b and c, a database on machine d, and perhaps a standby of it on machine e."""

    def __init__(
        self, cluster: Cluster, server: PostgresServer, standby: PostgresServer | None = None
    ) -> None:
        self.cluster = cluster
        self.server = server  # the one that takes changes
        self.standby = standby
        servers = [each for each in (server, standby) if each is not None]
        self._machines = {id(server): cluster.hosts.pop(3) for server in servers}
        for each in servers:
            machine = self._machines[id(each)]
            each.address, each.namespace = machine.address, machine.name
        hosts = ",".join(f"{each.address}:{each.port}" for each in servers)
        cluster.store = server.url.replace(f"{server.address}:{server.port}", hosts)

    @property
    def machine(self) -> ClusterHost:
        """The machine of the server that takes changes."""
        return self._machines[id(self.server)]

    @property
    def machines(self) -> list[ClusterHost]:
        """The machines of all servers."""
        return list(self._machines.values())

    def start(self) -> None:
        """Start the server, and a standby without which nothing is acknowledged."""
        self.start_server()
        if self.standby is not None:
            self.follow(self.standby)

    def start_server(self) -> None:
        """Start the server that takes changes, and wait until it does."""
        self.server.start()
        self._wait_for(self.server)

    def follow(self, standby: PostgresServer) -> None:
        """Make a standby of the server, of which each change then waits for it."""
        self.standby = standby
        standby.start_as_standby_of(self.server)
        self._wait_for(standby)
        self._sql(self.server, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._sql(self.server, "SELECT pg_reload_conf()")

    def promote(self) -> PostgresServer:
        """Have the standby take changes from now on; return the server that did before."""
        assert self.standby is not None
        former, self.server, self.standby = self.server, self.standby, None
        self._sql(self.server, "SELECT pg_promote()")
        return former

    def fill_disk(self) -> Callable[[], None]:
        """Leave no room on the server's disk, and so perhaps end it; returns what undoes it."""
        ballast = self.server.folder.with_name("ballast")
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

        def undo() -> None:
            ballast.unlink()
            if not self.server.is_running():
                self.start_server()

        return undo

    def _sql(self, server: PostgresServer, sql: str) -> list[Any]:
        return self._machines[id(server)].call(run_sql, server.url, sql)  # type: ignore[no-any-return]

    def _wait_for(self, server: PostgresServer) -> None:
        machine = self._machines[id(server)]
        wait_until(lambda: machine.call(answers, server.url), 20, "the database answers")

    def stop(self) -> None:
        """Leave nothing running."""
        for server in (self.server, self.standby):
            if server is not None:
                server.stop(now=True)
        for machine in self._machines.values():
            machine.kill()

    # --- The hosts --------------------------------------------------------------------------------

    @staticmethod
    def others_say(*hosts: ClusterHost) -> str:
        """Return where the controller is, as the last of some hosts tells it."""
        return str(hosts[-1].status()["controller"]["host"])

    def leader(self) -> ClusterHost:
        """Return the host whose controller acts, as any that answers says."""
        name = self.others_say(*self.cluster.hosts)
        return next(host for host in self.cluster.hosts if host.label == name)

    def followers(self) -> list[ClusterHost]:
        """Return the other hosts."""
        leader = self.leader()
        return [host for host in self.cluster.hosts if host is not leader]

    def runs_on_all(self) -> bool:
        """Return whether a controller that can save answers, and tells that all hosts run."""
        with contextlib.suppress(AssertionError):
            report = self.leader().status()
            states = {host["name"]: host["state"] for host in report["hosts"]}
            return states == RUNNING and report["saving"]["failing_since"] is None
        return False


@contextlib.contextmanager
def shared_database(
    folder: Path, *, standby: bool = False, size: str = ""
) -> Iterator[SharedDatabase]:
    """Make three hosts, not started, and a database that runs; ``size`` is that of its disk."""
    with ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(5 if standby else 4, folder))
        server = stack.enter_context(postgres_server(size=size))
        second = PostgresServer(stack.enter_context(postgres_folder(size)), free_port())
        made = SharedDatabase(cluster, server, second if standby else None)
        stack.callback(made.stop)
        made.start()
        yield made
