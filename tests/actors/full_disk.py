"""A system whose disk is full, then read-only: run in a mount namespace by test_full_disk.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from greenroom import serve
from greenroom.serve.exceptions import StateNotSavedError
from tests.support.systems import RunningSystem, wait_until


class System(RunningSystem):
    """One whose clients are made one after the other, as the controllers are."""

    @contextlib.contextmanager
    def client(self) -> Iterator[serve.Client]:
        with self.as_default(), serve.Client.connect() as made:
            yield made


def hello(_request: object) -> str:
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
        first = refusal(lambda: client.create_backend(tag, hello))  # of the controller that was
        assert cause in first, first
        assert str(disk / "state/store") in first, first
        assert running.get("/hello")[1] == b"hello"
        then = refusal(lambda: client.set_traffic("hello", {"old": 1.0}))  # of the next, that waits
        assert cause in then, then
        assert "Nothing was changed" in then, then
    told = running.greenroom("status")
    assert told.returncode == 1, told.stdout
    assert "the state cannot be saved since" in told.stdout, told.stdout
    assert cause in str(saving(running)["error"])


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
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as written, contextlib.suppress(OSError):
            while True:
                written.write(bytes(4096))
        refuses(running, disk, "other", "No space left on device")
        filler.unlink()
        goes_on(running, "other")
        store = disk / "state/store"
        for options in (["--bind", store, store], ["-o", "remount,bind,ro", store]):
            subprocess.run(["mount", *options], check=True)
        refuses(running, disk, "third", "Read-only file system")
        subprocess.run(["umount", "--lazy", store], check=True)
        goes_on(running, "third")
    finally:
        running.stop()


if __name__ == "__main__":
    main()
