"""Where a replica's code finds its folders and packages: made once per host, and shared.

Theory of operation. Folders are in folders.py. Packages are in a virtual environment, named by the
hash of all it is made of: the requirements, the installer, the interpreter, and what Greenroom
itself requires. The first replica that needs it takes a lock, makes it, and marks it as complete;
others wait for the lock and find it. The installer inherits the lock, so nothing else touches a
half-made environment before the installer has ended too, whatever was killed; and it ends after
``TIMEOUT_S``. What is not marked when the lock is free is made anew. A failure is kept for those
that waited meanwhile, so that they do not each run into it again.

The replica then goes on as a program of the environment's interpreter. The host's packages, and
with them Greenroom, come after the environment's own on ``sys.path``: pydantic is the environment's
where it has one. What Greenroom requires is a constraint of the installation, so a version that it
cannot use fails with both names. An environment is whole when it has imported Greenroom once.

The host process removes environments that no replica uses, but for the last ``KEPT_UNUSED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from greenroom.actors.environments.folders import Arrival, lock_file, locked, remove_unused
from greenroom.actors.messages.control import FolderFetched
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import check_own
from greenroom.core.config import RuntimeEnv, without_credentials
from greenroom.core.errors import DeployFailedError

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800  # for one program of an installation
KEPT_UNUSED = 3
COMPLETE = "greenroom-complete"  # a file in an environment that is whole
_PIP = "pip-"  # begins the name of one that has pip, for all others
_SHOWN_LINES, _SHOWN_CHARACTERS = 3, 600  # of an installer's errors
# Beside the replica, which may be killed: it ends the program, with all that this has started.
_LIMITED = """
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
signal.alarm(int(sys.argv[1]))
code = os.spawnv(os.P_WAIT, sys.argv[2], sys.argv[2:])
sys.exit(code if code >= 0 else 128 - code)
"""
IMPORT = "importing Greenroom with these packages"


class Environment:
    """The runtime environment of one replica; ``ask`` asks the controller for a folder."""

    def __init__(self, settings: HostSettings, env: RuntimeEnv, ask: Callable[[str], None]) -> None:
        self._packages_at, self._folders_at = settings.environments_dir, settings.folders_dir
        self._env = env
        self._arrivals = {
            digest: Arrival(self._folders_at, digest, partial(ask, digest))
            for digest in env.folders
        }
        self.trouble = ""  # that status is to show
        self.name = ""  # of the virtual environment
        here = Path(sys.prefix)
        self._is_entered = here.parent == self._packages_at
        if self._is_entered:
            self.name = here.name
        elif env.requirements is not None:
            self.name = name_of(*env.requirements)

    async def enter_packages(self) -> str | None:
        """Return the interpreter to go on in once the required packages are there; None for this.

        DeployFailedError where they cannot be installed.
        """
        os.environ.update(self._env.env_vars)
        if self._env.requirements is None or self._is_entered:
            return None
        installer, lines = self._env.requirements
        folder = self._packages_at / self.name
        self.trouble = without_credentials(f"{installer} installs {', '.join(lines)}")
        try:
            await prepare(folder, installer, lines)
        finally:
            self.trouble = ""
        enter(folder)
        return python_of(folder)

    async def enter_folders(self) -> None:
        """Let the code find its folders when they are here; DeployFailedError."""
        if not self._arrivals:
            return
        await asyncio.gather(*(arrival.end() for arrival in self._arrivals.values()))
        sys.path[:0] = [str(self._folders_at / digest) for digest in self._env.folders]
        if self._env.working_dir is not None:
            os.chdir(self._folders_at / self._env.folders[0])

    def fetched(self, message: FolderFetched) -> None:
        """See :meth:`Arrival.arrived`."""
        if (arrival := self._arrivals.get(message.digest)) is not None:
            content = None if message.content is None else message.content.view
            arrival.arrived(content, message.error)


def constraints() -> tuple[str, ...]:
    """Return what Greenroom requires, and itself as it is, as lines of a constraints file."""
    try:
        lines = importlib.metadata.requires("greenroom") or ()
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return ()
    own = f"greenroom=={importlib.metadata.version('greenroom')}"
    return (own, *sorted(line for line in lines if "extra ==" not in line))


def name_of(installer: str, lines: tuple[str, ...]) -> str:
    """Return the name of the environment that has these requirements."""
    made_of = (installer, lines, constraints(), sys.version, sys.base_prefix)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()


async def prepare(folder: Path, installer: str, lines: tuple[str, ...]) -> None:
    """Return when the environment is there, and make it when it is not; DeployFailedError."""
    begun_at = time.time()
    try:
        async with locked(folder) as lock:
            if folder.exists():  # its name can be computed, and what it holds will run
                check_own(folder)
            if (folder / COMPLETE).exists():
                os.utime(folder)
            elif failure := _failure_since(folder, begun_at):
                raise DeployFailedError(failure)
            else:  # not here: the loop must answer meanwhile
                await asyncio.to_thread(_make, folder, installer, lines, lock)
    except OSError as error:
        raise DeployFailedError(f"{folder.parent} cannot be used: {error}") from error


def _failure_since(folder: Path, begun_at: float) -> str:
    """Return why another replica could not make an environment while this one has been waiting."""
    path = _failure_file(folder)
    with contextlib.suppress(OSError):
        if path.stat().st_mtime >= begun_at:
            return path.read_text(encoding="utf-8")
    return ""


def _make(folder: Path, installer: str, lines: tuple[str, ...], lock: int) -> None:
    lock = os.dup(lock)  # who waits for this may be cancelled, and closes it then
    try:
        make(folder, installer, lines, lock)
    except Exception as error:  # whatever it is, the replica must not wait for ever
        with contextlib.suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)
            _failure_file(folder).write_text(str(error), encoding="utf-8")
        raise DeployFailedError(str(error)) from error
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # what an installer leaves running has it open
        os.close(lock)


def make(folder: Path, installer: str, lines: tuple[str, ...], lock: int) -> None:
    """Make an environment; DeployFailedError with what the installer said. It holds ``lock``."""
    shown = without_credentials(" ".join(lines))
    logger.info("making the environment %s with %s: %s", folder.name, installer, shown)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    python = python_of(folder)
    command = _uv(python) if installer == "uv" else _pip(folder.parent, python)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], "venv", lock)
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "constraints.txt").write_text("\n".join(constraints()) + "\n", encoding="utf-8")
    files = ["-r", str(folder / "requirements.txt"), "-c", str(folder / "constraints.txt")]
    _run([*command, *files], installer, lock)
    paths = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    host = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    packages = sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(folder)})
    (Path(packages) / "greenroom-host.pth").write_text(host, encoding="utf-8")
    _run([python, "-c", "import greenroom.actors.replica.replica"], IMPORT, lock)
    (folder / COMPLETE).touch()


def _uv(python: str) -> list[str]:
    uv = shutil.which("uv")
    if uv is None:
        raise DeployFailedError("uv is not installed on this host; install it, or give pip")
    return [uv, "pip", "install", "--python", python]


def _pip(environments: Path, python: str) -> list[str]:
    """Return what installs by pip: one of this host's, as to put it into each takes 3 s."""
    version = hashlib.sha256((sys.version + sys.base_prefix).encode()).hexdigest()
    folder = environments / f"{_PIP}{version}"
    lock = os.open(lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], "venv", lock)
            (folder / COMPLETE).touch()
    finally:
        os.close(lock)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--python", python, "install"]
    return [*pip, "--disable-pip-version-check", "--no-input"]


def _run(command: list[str], what: str, lock: int) -> None:
    """Run a program that holds ``lock``; DeployFailedError where it fails, or takes TIMEOUT_S."""
    # A file: what a program leaves running, such as a compiler's server, never closes a pipe.
    with tempfile.TemporaryFile() as printed:
        done = subprocess.run(
            [sys.executable, "-IS", "-c", _LIMITED, str(TIMEOUT_S), *command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,
            check=False,
        )
        said = os.pread(printed.fileno(), os.fstat(printed.fileno()).st_size, 0)
    if done.returncode:
        output = without_credentials(said.decode(errors="replace").strip())
        is_late = done.returncode == -signal.SIGKILL
        how = f"did not end within {TIMEOUT_S} s" if is_late else "failed"
        logger.error("%s %s:\n%s", what, how, output)
        raise DeployFailedError(f"{what} {how}: {_errors_in(output)}")


def _errors_in(output: str) -> str:
    """Return the last lines of an installer's output that tell of errors, as one line."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Using Python")]  # uv's first
    # In pip's words, the lines that tell of errors; uv says nothing else at its end.
    errors = [
        line
        for line in lines
        if (line.startswith("ERROR") and "ResolutionImpossible" not in line)
        or re.search(r" depends on |^The user requested ", line)
    ]
    return "; ".join((errors or lines)[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:]


def python_of(folder: Path) -> str:
    """Return an environment's interpreter."""
    return str(folder / "bin" / "python")


def enter(folder: Path) -> None:
    """Let programs that this one starts use the environment too, as its ``activate`` does."""
    os.environ["VIRTUAL_ENV"] = str(folder)
    programs = (str(folder / "bin"), os.environ.get("PATH", ""))
    os.environ["PATH"] = os.pathsep.join(filter(None, programs))


def prune(environments: Path, in_use: Callable[[], Collection[str]]) -> None:
    """Remove environments that no replica uses, but for those that were used last."""
    found = {environments / path.name.partition(".")[0] for path in environments.glob("*")}
    unused = [p for p in found if not p.name.startswith(_PIP) and p.name not in in_use()]
    for path in sorted(unused, key=_used_at, reverse=True)[KEPT_UNUSED:]:
        remove_unused(path, "environment", in_use, _failure_file(path))


def _used_at(folder: Path) -> float:
    """Return when an environment was last used, 0 for one that is not whole."""
    with contextlib.suppress(FileNotFoundError):
        if (folder / COMPLETE).exists():
            return folder.stat().st_mtime
    return 0.0


def _failure_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.failure")
