"""The only thing here that runs something on a host: the system's OpenSSH client.

The user's configuration, agent and known hosts hold. All that is run on a host in one run of the
command shares a connection. Nothing is asked: what would be is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from greenroom.core.errors import GreenroomError
from greenroom.serve.up import on_host
from greenroom.serve.up.hosts_file import Target

_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": 10,
    "ServerAliveInterval": 5,  # a cable that was pulled is an error after 15 s
    "ServerAliveCountMax": 3,
    "ControlMaster": "auto",
    "ControlPersist": 60,  # where this command is killed
}
# Reads on_host.py by its length from stdin, on which a request and files follow.
_BOOT = (  # one line, for any shell
    "import sys; sys.version_info >= (3, 11) or "
    'sys.exit("Python 3.11 or newer is needed, and this is " + sys.version); '
    'exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), "on_host.py", "exec"))'
)
_SSH_FAILED = 255
_MAX_PARENT = 60  # characters, of a path to which ssh adds 26 of its own
_NO_PROGRAM = (126, 127)


class HostError(GreenroomError):
    """Something failed on a host, or a host cannot be reached; the text names it."""


class UnreachableError(HostError):
    """SSH does not come to a host."""


class Ssh:
    """Connections to hosts, which are made when they are needed; thread-safe."""

    def __init__(self) -> None:
        # Of sockets, whose paths may have some 100 bytes; TMPDIR may be longer than that allows.
        parent = "/tmp" if len(tempfile.gettempdir()) > _MAX_PARENT else None
        self._folder = Path(tempfile.mkdtemp(prefix="greenroom-", dir=parent))
        self._targets: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for target in self._targets:
            command = [*self._command(target), "-O", "exit", "--", target]
            subprocess.run(command, check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        target: Target,
        operation: str,
        files: Mapping[str, Path | bytes] | None = None,
        **arguments: Any,
    ) -> Any:
        """Run an operation of on_host.py with its arguments, and files by name; return its answer.

        HostError, with what it printed, where it fails.
        """
        self._targets.add(target.ssh)
        remote = f"exec {shlex.quote(target.python)} -c {shlex.quote(_BOOT)}"
        # A file, for the process that keeps the connection holds it open.
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self._command(target.ssh), "-T", "--", target.ssh, remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            with process:
                assert process.stdin is not None
                assert process.stdout is not None
                # Of a host that has ended the exit code says why; closing writes what is buffered.
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    _send(process.stdin, target.dir, operation, files, arguments)
                output = process.stdout.read()
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
        if process.returncode:
            raise _error(target, process.returncode, text)
        return json.loads(output.splitlines()[-1])  # after what a shell's start files print

    def _command(self, target: str) -> list[str]:
        name = hashlib.sha256(target.encode()).hexdigest()[:8]
        options = {**_OPTIONS, "ControlPath": self._folder / name}
        return ["ssh", *(f"-o{name}={value}" for name, value in options.items())]


def _send(
    stdin: Any,
    folder: str,
    operation: str,
    files: Mapping[str, Path | bytes] | None,
    arguments: Mapping[str, Any],
) -> None:
    program = Path(on_host.__file__).read_bytes()
    asked = json.dumps({"operation": operation, "dir": folder, "arguments": arguments})
    stdin.write(b"%d\n%b%b\n" % (len(program), program, asked.encode()))
    if files is None:
        return
    with tarfile.open(fileobj=stdin, mode="w|") as archive:
        for name, content in files.items():
            if isinstance(content, Path):
                archive.add(content, name)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _error(target: Target, code: int, text: str) -> HostError:
    if code == _SSH_FAILED:
        return UnreachableError(
            f"host {target.name!r}: ssh does not come to {target.ssh}: {text or 'it was cut off'}; "
            f"see that `ssh {target.ssh} true` works and asks nothing, then repeat this"
        )
    if code in _NO_PROGRAM:
        text = (
            f"no Python can be run as {target.python!r} ({text}); install Python 3.11 or newer "
            "there, or name it with `python:`"
        )
    return HostError(f"host {target.name!r}: {text or f'exit code {code}'}")
