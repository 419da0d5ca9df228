"""A system whose disk is full, then read-only: run in a mount namespace by test_full_disk.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from greenroom import serve
from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.records import records_of
from greenroom.serve.exceptions import StateNotSavedError
from tests.support import footprint
from tests.support.systems import RunningSystem, wait_until


class System(RunningSystem):
    """One whose clients are made one after the other, as the controllers are."""

    def found(self, role: str) -> list[int]:
        """Return the pids of a role, on record or not."""
        return [process.pid for process in records_of(self.settings).find(role)]

    @contextlib.contextmanager
    def client(self) -> Iterator[serve.Client]:
        with self.as_default(), serve.Client.connect() as made:
            yield made


def hello(_request: object) -> str:
    return "hello"


def large(_request: object, _filler: bytes = bytes(64 * 1024)) -> str:
    """Answer; its code takes more than the last block of a file may have room for."""
    return "hello"


def refusal(call: Callable[[], object]) -> str:
    """Return why a change is refused."""
    try:
        call()
    except StateNotSavedError as error:
        return str(error)
    raise AssertionError("the change was not refused")


def saving(running: System) -> dict[str, Any]:
    return running.status_json()["saving"]  # type: ignore[no-any-return]


def refuses(running: System, disk: Path, tag: str, cause: str) -> None:
    """Every change is refused in time, nothing is lost, and serving goes on."""
    with running.client() as client:
        first = refusal(lambda: client.create_backend(tag, large))  # of the controller that was
        assert cause in first, first
        assert str(disk / "state/store") in first, first
        assert running.get("/hello")[1] == b"hello"
        then = refusal(lambda: client.set_traffic("hello", {"old": 1.0}))  # of the next, that waits
        assert cause in then, then
        assert "Nothing was changed" in then, then
    output = running.greenroom("status")
    assert output.returncode == 1, output.stdout
    assert "the state cannot be saved since" in output.stdout, output.stdout
    assert cause in str(saving(running)["error"])


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Have the disk full, also when the dead leave their records, and what was tried is removed."""
    filler, ends = disk / "filler", threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as written:
            while not ends.wait(0.001):
                with contextlib.suppress(OSError):
                    while True:
                        written.write(bytes(4096))

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        wait_until(lambda: os.statvfs(disk).f_bfree == 0, 10, "a full disk")
        yield
    finally:
        ends.set()
        filling.join()
        filler.unlink()


def serves_on(running: System) -> None:
    """Whatever dies is replaced, without a record."""
    for role in ("http worker", "http master", "host"):
        (victim,) = running.found(role)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda old=victim: identify(old) is None, 10, f"the end of the {role}")
        if role == "host":  # with its front, which the next one forks
            (front,) = running.found("http master")
            os.kill(front, signal.SIGKILL)
            wait_until(lambda old=front: identify(old) is None, 10, "the end of the front")
            with (running.settings.logs_dir / "host.log").open("ab", buffering=0) as log:
                log.write(b"-" * (-log.tell() % 4096))  # to the end of a page: none is free
            system.start(running.settings)
        wait_until(lambda r=role: running.found(r), 20, f"another {role}")
        wait_until(lambda: running.get("/hello")[1] == b"hello", 20, f"answers without the {role}")


def leaves_alone_what_serves(running: System) -> None:
    """Without an admin all would be started anew, and no controller could start a replica."""
    (admin,) = running.found("thespian admin")
    (replica,) = running.found("replica")
    os.kill(admin, signal.SIGKILL)
    until = time.monotonic() + 2  # no log could tell, on that disk; it took a tenth of that
    while time.monotonic() < until:
        assert running.get("/hello")[1] == b"hello"
        assert running.found("replica") == [replica]
        time.sleep(0.05)
    assert running.found("thespian admin") == []


def stops(running: System) -> None:
    """A system on a read-only disk tells its status, and is stopped."""
    assert running.greenroom("status").returncode == 0
    running.disconnect()
    output = running.greenroom("stop")
    assert output.returncode == 0, output.stdout + output.stderr
    assert not footprint.pids_of(running)
    output = running.greenroom("start")
    assert output.returncode == 1
    assert f"the state dir {running.settings.state_dir} cannot be used" in output.stderr, (
        output.stderr
    )


def goes_on(running: System, tag: str) -> None:
    """What was refused was not made; it is made now, without a restart."""
    wait_until(lambda: saving(running)["failing_since"] is None, 10, "the state to be saved")
    with running.client() as client:
        assert tag not in client.list_backends()
        client.wait_for_goal(client.create_backend(tag, hello), 20)
        assert tag in client.list_backends()
    assert running.get("/hello")[1] == b"hello"


def main() -> None:
    disk = Path(sys.argv[1])
    running = System(disk / "state")
    running.start()
    try:
        with running.client() as client:
            client.wait_for_goal(client.create_backend("hello", hello), 20)
            client.create_endpoint("hello", backend="hello", route="/hello")
        with filled(disk):
            serves_on(running)
            refuses(running, disk, "other", "No space left on device")
            leaves_alone_what_serves(running)
        wait_until(lambda: running.greenroom("status").returncode == 0, 20, "a new start")
        goes_on(running, "other")
        store = disk / "state/store"
        for options in (["--bind", store, store], ["-o", "remount,bind,ro", store]):
            subprocess.run(["mount", *options], check=True)
        refuses(running, disk, "third", "Read-only file system")
        subprocess.run(["umount", "--lazy", store], check=True)
        goes_on(running, "third")
        for options in (["--bind", disk, disk], ["-o", "remount,bind,ro", disk]):
            subprocess.run(["mount", *options], check=True)
        stops(running)
        subprocess.run(["umount", "--lazy", disk], check=True)
    finally:
        running.stop()


if __name__ == "__main__":
    main()
