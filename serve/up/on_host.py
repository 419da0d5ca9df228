"""What runs on a host: ssh.py sends this file to its Python, and then a request and files.

Theory of operation. All that a host has is in one folder:

    wheels/         the wheels of the release that was installed last
    releases/R/     a virtual environment, whole once it has the file DONE
    generations/G   a release with settings: a script that runs its greenroom with them
    greenroom       a link to the generation that is to run
    healthy         a link to the last one that was healthy, which a failed change goes back to
    state/          the state dir
    hosts.json      the hosts that the last run had, and how they are reached

A link is replaced by a rename and a file is in its place when it is whole, so whatever is cut off
is done again. A change holds the lock: after its command has lost the connection it still ends
before the next one begins. There is nothing but the standard library here, and no import of ours.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DONE = ".greenroom-done"
UNIT = "greenroom-up.service"
SYSTEMD = Path("/run/systemd/system")
SYSTEM_UNITS, USER_UNITS = Path("/etc/systemd/system"), Path("~/.config/systemd/user")
STATUS_TIMEOUT_S = 30.0
LOG_LINES = 10  # with an error
MADE = (
    *("greenroom", "healthy", "generations", "releases", "wheels", "state"),
    *("hosts.json", "lock"),
)
UNIT_TEXT = """\
[Unit]
Description=Greenroom
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
WatchdogSec=30
WorkingDirectory={home}
ExecStart={home}/greenroom start --block
Restart=on-failure
RestartSec=1
# Only the command is signalled, and it stops the system.
KillMode=process
TimeoutStopSec=90
LimitNOFILE=65536
UMask=0077

[Install]
WantedBy={target}
"""


class FailedError(Exception):
    """What was asked for failed; the text is for the user."""


# --- The operations -------------------------------------------------------------------------------


def inspect(home: Path) -> dict[str, Any]:
    """Return what there is; nothing is changed."""
    wheels, releases, key = home / "wheels", home / "releases", home / "state" / "cluster.key"
    return {
        "python": "{}.{}".format(*sys.version_info),
        "wheels": {path.name: sha256(path) for path in wheels.glob("*.whl")},
        "releases": [path.parent.name for path in releases.glob(f"*/{DONE}")],
        "generation": _target(home / "greenroom"),
        "healthy": _target(home / "healthy"),
        "key": key.read_text() if key.exists() else "",
        "hosts": json.loads(_text(home / "hosts.json") or "{}"),
    }


def install(home: Path, release: str, wheels: Sequence[str], requirements: Sequence[str]) -> None:
    """Install a release of these wheels, which are there."""
    used = {release, *(_release_of(home, link) for link in ("greenroom", "healthy"))}
    for path in (home / "wheels").glob("*"):
        if path.name not in wheels:
            path.unlink()
    for path in (home / "releases").glob("*"):
        if path.name not in used or not (path / DONE).exists():
            shutil.rmtree(path)
    venv = home / "releases" / release
    if uv := shutil.which("uv"):
        _check(uv, "venv", "--quiet", "--python", sys.executable, venv)
        pip = [uv, "pip", "install", "--python", venv, "--no-cache", "--compile-bytecode"]
    else:
        _check(sys.executable, "-m", "venv", venv)
        pip = [venv / "bin" / "python", "-m", "pip", "--isolated", "install"]
        pip += ["--disable-pip-version-check", "--no-cache-dir"]
    _check(*pip, "--quiet", "--no-index", "--find-links", home / "wheels", *requirements)
    (venv / DONE).touch()


def receive(home: Path) -> None:
    """Take the wheels that come as files."""
    _receive(home / "wheels")


def make_key(home: Path, release: str) -> str:
    """Return the text of a new cluster file."""
    path = home / "state" / "cluster.key"
    path.parent.mkdir(exist_ok=True)
    _check(home / "releases" / release / "bin" / "greenroom", "keygen", path)
    return path.read_text()


def record(home: Path, hosts: Mapping[str, Any], key: str = "") -> None:
    """Keep the hosts, and the cluster file if there is none."""
    path = home / "state" / "cluster.key"
    if key and not path.exists():
        path.parent.mkdir(exist_ok=True)
        _write(path, key)
    _write(home / "hosts.json", json.dumps(hosts))


def start(home: Path, generation: str, release: str, environ: Mapping[str, str]) -> str:
    """Start a generation in place of the one that runs; release "" for one that is there."""
    path = home / "generations" / generation
    if release:
        variables = {"GREENROOM_STATE_DIR": str(home / "state"), **environ}
        exports = "".join(f"export {n}={shlex.quote(v)}\n" for n, v in variables.items())
        program = shlex.quote(str(home / "releases" / release / "bin" / "greenroom"))
        _write(path, f'#!/bin/sh\n{exports}exec {program} "$@"\n', mode=0o700)
    if _target(home / "greenroom") != generation:
        stop(home)
        _link(home / "greenroom", path)
    systemctl = _systemctl()
    log = home / "state" / "logs" / "host.log"
    size = log.stat().st_size if log.exists() else 0
    if not systemctl:
        try:
            return _check(home / "greenroom", "start", cwd=home)
        except FailedError as error:
            if log.name not in str(error):
                raise
            output = log.read_bytes()[size:].decode(errors="replace")
            raise FailedError(f"{error}\n{_end_of(output)}") from None
    unit, is_system = _unit(), os.geteuid() == 0
    target = "multi-user.target" if is_system else "default.target"
    _write(unit, UNIT_TEXT.format(home=home, target=target), mode=0o644)
    _check(*systemctl, "daemon-reload")
    _check(*systemctl, "enable", "--quiet", UNIT)
    try:
        return _check(*systemctl, "start", UNIT)
    except FailedError as error:
        journal = ["journalctl", *(() if is_system else ("--user",)), "--no-pager", "-o", "cat"]
        output = _run(*journal, "-u", UNIT, "--since", "-2min").stdout
        raise FailedError(f"{error}\n{_end_of(output)}".strip()) from None


def confirm(home: Path) -> None:
    """Keep what runs as what a later change goes back to."""
    _link(home / "healthy", (home / "greenroom").resolve())
    for path in (home / "generations").iterdir():
        if path.name != _target(home / "healthy"):
            path.unlink()


def stop(home: Path, *, delete: bool = False) -> None:
    """Stop the system, and ``delete`` all that this has made."""
    systemctl = _systemctl()
    if systemctl and _unit().exists():
        _check(*systemctl, "disable", "--quiet", "--now", UNIT)
    links = [path for name in ("greenroom", "healthy") if (path := home / name).exists()]
    for number, link in enumerate(links, 1):
        try:
            _check(link, "stop", cwd=home)
            break
        except FailedError:  # of a release that is broken, which the one before can stop
            if number == len(links):
                raise
    if not delete:
        return
    if systemctl:
        _unit().unlink(missing_ok=True)
    for path in (home / name for name in MADE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not any(home.iterdir()):
        home.rmdir()


def report(home: Path) -> Any:
    """Return what ``greenroom status --json`` prints, None where nothing answers."""
    try:
        done = _run(home / "greenroom", "status", "--json", timeout=STATUS_TIMEOUT_S)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def command(home: Path, args: Sequence[str], environ: Mapping[str, str]) -> list[Any]:
    """Run greenroom in a folder with the files that come; return exit code, stdout and stderr."""
    with tempfile.TemporaryDirectory() as folder:
        _receive(Path(folder))
        done = _run(home / "greenroom", *args, cwd=folder, env={**os.environ, **environ})
    return [done.returncode, done.stdout, done.stderr]


OPERATIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (inspect, receive, install, make_key, record, start, confirm, stop, report, command)
}
# These take no lock: they change nothing, or wait for a connection that may be cut on the way.
UNLOCKED = ("inspect", "receive", "report", "command")


# --- What they are made of ------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _receive(folder: Path) -> None:
    """Unpack the files that come on stdin; a file is in its place when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            source = archive.extractfile(member)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with temporary.open("wb") as file:
                    if source is not None:
                        shutil.copyfileobj(source, file)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


def _link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _target(link: Path) -> str:
    return os.path.basename(os.readlink(link)) if link.is_symlink() else ""


def _release_of(home: Path, link: str) -> str:
    """Return the release of a generation; its name begins with that."""
    return _target(home / link).rpartition("-")[0]


def _end_of(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_LINES:])


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _systemctl() -> list[str]:
    """Return the command of the systemd that this user may use; nothing without one."""
    if not SYSTEMD.is_dir() or not shutil.which("systemctl"):
        return []
    if os.geteuid() == 0:
        return ["systemctl"]
    # Without lingering, a user's units end with the connection.
    if _run("loginctl", "enable-linger").returncode or _run("systemctl", "--user").returncode:
        return []
    return ["systemctl", "--user"]


def _unit() -> Path:
    return (SYSTEM_UNITS if os.geteuid() == 0 else USER_UNITS.expanduser()) / UNIT


def _run(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(arg) for arg in args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def _check(*args: Any, **options: Any) -> str:
    """Run a program, and return what it prints; FailedError with that where it fails."""
    done = _run(*args, **options)
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).removeprefix("Error: ")
        raise FailedError(output or f"{shlex.join(map(str, args))}: exit code {done.returncode}")
    return done.stdout.strip()


def main() -> None:
    """Do what the line on stdin asks for, and print the answer as JSON."""
    os.umask(0o077)
    asked = json.loads(sys.stdin.buffer.readline())
    home = Path(asked["dir"]).expanduser().absolute()
    try:
        if asked["operation"] not in UNLOCKED:
            home.mkdir(parents=True, exist_ok=True)
            lock = (home / "lock").open("w")  # held to the end; what is started does not inherit it
            fcntl.flock(lock, fcntl.LOCK_EX)
        answer = OPERATIONS[asked["operation"]](home, **asked["arguments"])
    except (FailedError, tarfile.TarError) as error:
        sys.exit(str(error))
    except OSError as error:
        where = error.filename or home
        sys.exit(f"{where}: {error.strerror or error}; mend that, or name another folder by `dir:`")
    print(json.dumps(answer))  # noqa: T201  # that is what ssh.py reads


if __name__ == "__main__":
    main()
