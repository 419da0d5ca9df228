"""Users' folders on one host: fetched once, checked, unpacked and kept while a replica needs them.

Theory of operation. A folder is a zip named by its sha256 (serve/code/runtime_env.py), and unpacked
at ``folders/<sha256>`` in the state dir: that path is whole or not there. The first replica of the
host that needs it takes a lock and asks the controller; others wait for the lock and then find the
folder. The lock is released when its replica dies. The host process removes folders that no replica
of the host has used for a while. A zip's paths, links and sizes are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import io
import logging
import os
import shutil
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path, PurePosixPath

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

    ``ask`` asks the controller, whose answer goes to :meth:`arrived`.
    """

    def __init__(self, folders: Path, digest: str, ask: Callable[[], None]) -> None:
        self._folders, self._digest = folders, digest
        self._ask = ask
        self._answer: asyncio.Future[memoryview] | None = None

    async def end(self) -> None:
        """Return when it is here, and fetch it when it is not; DeployFailedError."""
        path = self._folders / self._digest
        async with locked(path):
            if path.exists():
                os.utime(path)
            else:
                await self._fetch()

    async def _fetch(self) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        while not self._answer.done():
            self._ask()
            await asyncio.wait([self._answer], timeout=ASK_AGAIN_S)
        answer, self._answer = self._answer, None  # the zip is not to be kept
        content = answer.result()
        try:  # not here: the loop must answer while a large one is written
            await asyncio.to_thread(unpack, content, self._digest, self._folders)
        except Exception as error:  # whatever it is, the replica must not wait for ever
            text = f"a folder of the runtime_env cannot be unpacked: {error}"
            raise DeployFailedError(text) from error

    def arrived(self, content: memoryview | None, error: str) -> None:
        """Take the controller's answer; a repeat is ignored."""
        if self._answer is None or self._answer.done():
            return
        if content is None:
            self._answer.set_exception(DeployFailedError(error))
        else:
            self._answer.set_result(content)


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


def prune(folders: Path, in_use: Callable[[], Collection[str]]) -> None:
    """Remove folders that no replica uses, and none has for ``KEPT_UNUSED_S``."""
    if folders.exists():
        for path in sorted(folders.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if path.is_dir() and time.time() - path.stat().st_mtime > KEPT_UNUSED_S:
                    remove_unused(path, "folder", in_use)


def remove_unused(
    path: Path, what: str, in_use: Callable[[], Collection[str]], *companions: Path
) -> None:
    """Remove what no replica uses, with its lock and ``companions``, unless it is locked.

    ``in_use`` is asked with the lock, for a replica that begins says first that it uses it.
    """
    lock = try_lock(path)
    if lock is None:
        return
    try:
        if path.name not in in_use():
            logger.info("removing the %s %s, which no replica uses", what, path.name)
            shutil.rmtree(path, ignore_errors=True)  # what stays must not keep the others
            for left in (*companions, lock_file(path)):
                left.unlink(missing_ok=True)
    finally:
        os.close(lock)


def lock_file(folder: Path) -> Path:
    """Return the file that is a folder's lock."""
    return folder.with_name(f"{folder.name}.lock")


@contextlib.asynccontextmanager
async def locked(folder: Path) -> AsyncIterator[int]:
    """Hold the lock of a folder, once no process has it; see :func:`try_lock`.

    What it lies in is made, and must be ours alone; DeployFailedError where it cannot be used.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(folder.parent)
        while (lock := try_lock(folder)) is None:
            await asyncio.sleep(LOCK_POLL_S)
    except OSError as error:
        raise DeployFailedError(f"{folder.parent} cannot be used: {error}") from error
    try:
        yield lock
    finally:
        os.close(lock)


def try_lock(folder: Path) -> int | None:
    """Take the lock of a folder; None while any process has it.

    It is given back once it is unlocked, or all descriptors of it are closed, those of child
    processes included.
    """
    path = lock_file(folder)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:  # another process has it, or has just removed it
        pass
    os.close(fd)
    return None
