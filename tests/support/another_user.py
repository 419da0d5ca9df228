"""Another user of this machine, who means harm: a process that gave up root's rights."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

NOBODY = 65534
_BECOME = f"""
import array, errno, os, socket, struct, sys, time
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""


@contextlib.contextmanager
def another_user(program: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Run a program of the standard library's as user 65534 until it ends or is no longer wanted.

    It has printed its first line when this returns, and starts as root, which it has to be.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME + program, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        assert said == "ready", f"the other user's program said {said!r}"
        yield process
    finally:
        process.kill()
        process.communicate()
