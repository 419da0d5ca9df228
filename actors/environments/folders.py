"""Users' folders on one host: fetched once, checked, unpacked and kept while a replica needs them.

Theory of operation. A folder is a zip named by its sha256 (serve/code/runtime_env.py), and unpacked
at ``folders/<sha256>`` in the state dir: that path is whole or not there. The first replica of the
host that needs it takes a lock and asks the controller; others wait for the lock and then find the
folder. The lock is released when its replica dies. The host process removes folders that no replica
of the host has used for a while. A zip's paths, links and sizes are checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.actors.runtime.state_dir import check_own
from greenroom.core.errors import DeployFailedError

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.05
ASK_AGAIN_S = 5.0  # a controller may have died with the question
MAX_BYTES = 1024 * 1024 * 1024  # unpacked, whatever the zip says
KEPT_UNUSED_S = 600.0
_PIECE = 1024 * 1024


class Arrival:
    """Gets one folder to this host for one replica; used on its loop.

    ``ask`` asks the controller, whose answer goes to :meth:`arrived`. ``on_here`` gets the folder,
    or a DeployFailedError.
    """

    def __init__(
        self,
        loop: Loop,
        folders: Path,
        digest: str,
        ask: Callable[[], None],
        on_here: Callable[[Path | DeployFailedError], None],
    ) -> None:
        self._loop = loop
        self._folders, self._digest = folders, digest
        self._ask, self._on_here = ask, on_here
        self._lock: int | None = None
        self._again: Timer | None = None

    def begin(self) -> None:
        """Look for it, and fetch it when it is not here."""
        try:
            self._folders.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(self._folders)
            self._lock = try_lock(_lock_file(self._folders / self._digest))
        except OSError as error:
            self._end(DeployFailedError(f"{self._folders} cannot be used: {error}"))
            return
        path = self._folders / self._digest
        if self._lock is None:
            self._loop.call_later(LOCK_POLL_S, self.begin)
        elif path.exists():
            os.utime(path)
            self._end(path)
        else:
            self._fetch()

    def _fetch(self) -> None:
        self._ask()
        self._again = self._loop.call_later(ASK_AGAIN_S, self._fetch)

    def arrived(self, content: memoryview | None, error: str) -> None:
        """Take the controller's answer; a repeat is ignored."""
        if self._again is None:
            return
        self._again.cancel()
        self._again = None
        if content is None:
            self._end(DeployFailedError(error))
            return
        # Not here: the loop must answer while a large one is written.
        threading.Thread(target=self._unpack, args=(content,), name="unpack", daemon=True).start()

    def _unpack(self, content: memoryview) -> None:
        result: Path | DeployFailedError
        try:
            result = unpack(content, self._digest, self._folders)
        except Exception as error:  # whatever it is, the replica must not wait for ever
            result = DeployFailedError(f"a folder of the runtime_env cannot be unpacked: {error}")
        self._loop.post(lambda: self._end(result))

    def _end(self, result: Path | DeployFailedError) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._on_here(result)


def unpack(content: bytes | memoryview, digest: str, folders: Path) -> Path:
    """Unpack a zip below ``folders``; ValueError where it is not that, or has what it must not."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"what came is not the zip {digest}")
    path, temporary = folders / digest, folders / f".{digest}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    left = MAX_BYTES
    try:
        temporary.mkdir(mode=0o700)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                left = _write(archive, info, temporary, left)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, below: Path, left: int) -> int:
    """Write one file of a zip; return how many bytes are left for others."""
    name = PurePosixPath(info.filename)
    kind = info.external_attr >> 16 & 0o170000
    if name.is_absolute() or ".." in name.parts or "\\" in info.filename or not name.parts:
        raise ValueError(f"{info.filename!r} would lie outside of the folder")
    if kind not in {0, 0o100000}:
        raise ValueError(f"{info.filename!r} is no plain file")
    target = below.joinpath(*name.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, open(target, "xb") as file:
        while piece := source.read(_PIECE):  # not what the zip says of its size
            left -= len(piece)
            if left < 0:
                raise ValueError(f"its files have more than {MAX_BYTES} bytes")
            file.write(piece)
        os.fchmod(file.fileno(), 0o755 if info.external_attr >> 16 & 0o100 else 0o644)
    return left


def prune(folders: Path, in_use: Callable[[], set[str]]) -> None:
    """Remove folders that no replica uses, and none has for ``KEPT_UNUSED_S``."""
    for path in _old(folders):
        lock = try_lock(_lock_file(path))
        if lock is None:
            continue
        try:
            # With the lock, for a replica that begins says first that it uses it.
            if path.name not in in_use():
                logger.info("removing the folder %s, which no replica uses", path.name)
                shutil.rmtree(path)
                _lock_file(path).unlink()
        finally:
            os.close(lock)


def _old(folders: Path) -> Iterator[Path]:
    if folders.exists():
        for path in sorted(folders.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if path.is_dir() and time.time() - path.stat().st_mtime > KEPT_UNUSED_S:
                    yield path


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def try_lock(path: Path) -> int | None:
    """Take the lock that is this file; None while any process has it.

    It is given back once all descriptors of it are closed, those of child processes included.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:  # another process has it, or has just removed it
        pass
    os.close(fd)
    return None
