"""A container without docker: what the Dockerfile says, in namespaces that util-linux makes.

The root file system is read-only: this machine's programs, and Python with Greenroom as the tests
run it. The state volume belongs to root and, as Kubernetes' fsGroup does it, to the user's group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.processes import child_pids
from tests.support import logs
from tests.support.programs import cannot_run
from tests.support.systems import free_port, wait_until
from tests.support.template import COMMAND_TIMEOUT_S

ROOT = Path(__file__).parents[2]
_BEGIN = r"""
root=$1 volume=$2 uid=$3; shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=755 container "$root"
mkdir -p "$root"/proc "$root"/dev "$root"/tmp "$root"/var/lib/greenroom
mount -t proc proc "$root"/proc
mount --rbind /dev "$root"/dev
mount -t tmpfs -o mode=1777 tmp "$root"/tmp
for folder in /etc /usr /bin /lib /lib64 /sbin $FOLDERS; do
    if [ -L "$folder" ]; then ln -s "$(readlink "$folder")" "$root$folder"
    elif [ -d "$folder" ]; then
        mkdir -p "$root$folder"
        mount --rbind -o ro "$folder" "$root$folder"
        mount -o remount,bind,ro "$root$folder"
    fi
done
mount --bind "$volume" "$root"/var/lib/greenroom
mount -o remount,ro "$root"
unset FOLDERS
exec chroot "$root" setpriv --reuid="$uid" --regid="$uid" --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all env -i "$@"
"""


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile's last stage, with what follows each."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1] != "#"]
    text = "\n".join(lines).replace("\\\n", " ")
    found = re.findall(r"^([A-Z]+)\s+(.*)$", text, re.MULTILINE)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return [(name, re.sub(r"\s+", " ", rest)) for name, rest in found[last:]]


def instruction(name: str) -> str:
    """Return what follows the last instruction of that name."""
    return [rest for each, rest in dockerfile() if each == name][-1]


class Container:
    """Runs the image's command; its standard output goes to a file."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.volume = folder / "volume"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.printed, self.errors = folder / "printed", folder / "errors"
        self.uid = int(instruction("USER").partition(":")[0])
        given = dict(pair.split("=", 1) for pair in shlex.split(instruction("ENV")))
        self.environ = {
            **given,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "GREENROOM_HTTP_HOST": "127.0.0.1",  # nothing of a test is open to others
            "GREENROOM_HTTP_PORT": str(self.port),
            "GREENROOM_ADMIN_PORT": str(free_port()),
            **environ,
        }
        self._root = folder / "root"
        self._root.mkdir()
        self.volume.mkdir()
        os.chown(self.volume, 0, self.uid)
        self.volume.chmod(0o2775)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def _variables(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environ.items()]

    def start(self, *command: str) -> None:
        """Run a command, by default the image's own, as process 1."""
        command = command or (
            *json.loads(instruction("ENTRYPOINT")),
            *json.loads(instruction("CMD")),
        )
        logs.begin(self.volume / "state/logs")
        # Not the whole clone: tox keeps its environments in a folder that others may not enter.
        ours = (str(each) for each in ROOT.iterdir() if each.is_dir() and each.name[0] != ".")
        folders = {*ours, sys.prefix, sys.base_prefix}
        with self.printed.open("ab") as output, self.errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--pid", "--fork"),
                    *("sh", "-euc", _BEGIN, "container"),
                    *(str(self._root), str(self.volume), str(self.uid)),
                    *self._variables,
                    *command,
                ],
                env={**os.environ, "FOLDERS": " ".join(sorted(folders))},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    @property
    def pid(self) -> int:
        """The pid of its process 1, as this machine sees it."""
        assert self._process is not None
        (pid,) = child_pids(self._process.pid)
        return pid

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as ``docker exec`` does."""
        user = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return subprocess.run(
            [
                *("nsenter", "--target", str(self.pid), "--mount", "--pid", "--root", "--wd"),
                *("setpriv", *user, "env", "-i", *self._variables, *command),
            ],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def check(self, *command: str) -> str:
        """Run a command in it, which must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def events(self) -> list[dict[str, Any]]:
        """Return what it has printed: a JSON object a line."""
        whole = self.printed.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, text: str) -> None:
        """Wait until it has printed an event with that text."""

        def is_printed() -> bool:
            assert self._process is None or self._process.poll() is None, self.errors.read_text()
            return any(text in each["message"] for each in self.events())

        wait_until(is_printed, 15, text)

    def terminate(self) -> int:
        """Send its process 1 SIGTERM, as ``docker stop`` does; return the exit code."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(COMMAND_TIMEOUT_S)

    def kill(self) -> None:
        """End its process 1, and with it, by the kernel, all others."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()
        logs.end(self.volume / "state/logs")


@contextlib.contextmanager
def container(folder: Path, **environ: str) -> Iterator[Container]:
    """Prepare a container, not started."""
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "setpriv", "--reuid=65534", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        cannot_run(f"namespaces cannot be made here: {tried.stderr}")
    made = Container(folder, **environ)
    try:
        yield made
    finally:
        made.kill()
