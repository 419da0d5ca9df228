"""A real PostgreSQL server of a test's own, on a port of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.support.programs import needed
from tests.support.systems import free_port, wait_until

PASSWORD = "se-cret"


def _program(name: str) -> str:
    return needed(name, "postgresql")


@dataclass
class PostgresServer:
    """A server whose databases are made by name."""

    folder: Path
    port: int
    address: str = "127.0.0.1"
    namespace: str = ""  # of the network, "" for the own one
    _names: Iterator[int] = field(default_factory=itertools.count)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{PASSWORD}@{self.address}:{self.port}/postgres"

    def new_database(self) -> str:
        """Return the URL of a database without a table: a schema, which costs less to make."""
        name = f"test{next(self._names)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")  # type: ignore[call-overload]
        return f"{self.url}?options=-csearch_path%3D{name}"

    def start(self, *options: str) -> None:
        # Processes are killed here, and no machine: what is written lasts.
        given = {
            "port": self.port,
            "listen_addresses": "*",
            "unix_socket_directories": "",
            "fsync": "off",
            "min_wal_size": "2MB",
            "max_wal_size": "8MB",
            "wal_keep_size": "16MB",  # else a restarted primary may lack what its standby needs
            "wal_retrieve_retry_interval": "200ms",  # else a standby is back after 5 s
        }
        settings = [f"-c{name}={value}" for name, value in given.items()]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._within(),
                    *_as_user(),
                    _program("postgres"),
                    "-D",
                    self.folder,
                    *settings,
                    *options,
                ],
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=self.folder,
            )

    def start_as_standby_of(self, primary: PostgresServer) -> None:
        """Start, with a copy of what a primary has in place of what was here, and follow it."""
        empty(self.folder)
        subprocess.run(
            [
                *self._within(),
                *_as_user(),
                _program("pg_basebackup"),
                f"--host={primary.address}",
                f"--port={primary.port}",
                "--username=postgres",
                f"--pgdata={self.folder}",
                "--checkpoint=fast",
                "--write-recovery-conf",
            ],
            check=True,
            capture_output=True,
            cwd=self.folder,
            env={**os.environ, "PGPASSWORD": PASSWORD},
        )
        self.start()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _within(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace] * bool(self.namespace)

    def wait(self) -> None:
        def answers() -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url, connect_timeout=2).close()
                return True
            return False

        wait_until(answers, 20, "the database server answers")

    def stop(self, *, now: bool = False) -> None:
        """End it: as pg_ctl's ``fast``, or as its ``immediate``, which is a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGQUIT if now else signal.SIGINT)
            self._process.wait(20)
            self._process = None


def _as_user() -> list[str]:
    """Return what a command of root's begins with: the server refuses to run as root."""
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] * (
        os.geteuid() == 0
    )


def empty(folder: Path) -> None:
    """Delete what is in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def postgres_folder(size: str = "") -> Iterator[Path]:
    """A folder for a server's files, on a disk of that size where one is given, as in "100m"."""
    with tempfile.TemporaryDirectory(prefix="greenroom-pg-") as name, contextlib.ExitStack() as end:
        if size:
            disk = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", name]
            subprocess.run(disk, check=True, capture_output=True)
            end.callback(subprocess.run, ["umount", name], check=True)
        folder = Path(name, "files")
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            for path in (Path(name), folder):
                shutil.chown(path, "postgres", "postgres")
        yield folder


@contextlib.contextmanager
def postgres_server(address: str = "127.0.0.1", size: str = "") -> Iterator[PostgresServer]:
    """A server with a password, made from nothing and removed again; not started yet."""
    with postgres_folder(size) as folder:
        passwords = folder.with_name("password")
        passwords.write_text(PASSWORD, encoding="ascii")
        if os.geteuid() == 0:
            shutil.chown(passwords, "postgres", "postgres")
        how = f"-U postgres -N -A scram-sha-256 --pwfile={passwords} --no-locale -E UTF8".split()
        subprocess.run(
            [*_as_user(), _program("initdb"), "-D", folder, "--wal-segsize=1", *how],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        with (folder / "pg_hba.conf").open("a", encoding="ascii") as file:
            file.write("host all,replication all 0.0.0.0/0 scram-sha-256\n")
        server = PostgresServer(folder, free_port(), address)
        try:
            yield server
        finally:
            server.stop(now=True)
