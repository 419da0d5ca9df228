"""Programs that tests need and pip does not install, as .ci/run has them for Debian; and Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

IS_CI = os.environ.get("CI") == "true"
_FOLDERS = (
    *os.environ.get("PATH", "").split(os.pathsep),
    *("/usr/sbin", "/usr/local/sbin"),
    *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin"))),
)


def needed(name: str, package: str = "") -> str:
    """Return the program's path; where it is missing, skip the test, but fail it in CI."""
    found = shutil.which(name, path=os.pathsep.join(_FOLDERS))
    return found or cannot_run(f"{name} is not installed: apt-get install {package or name}")


def cannot_run(reason: str) -> NoReturn:
    """Skip the test, saying what it lacks; in CI, where all is installed, fail it."""
    if IS_CI:
        pytest.fail(reason)
    pytest.skip(reason)


def python(*arguments: object, cwd: Path | str = "/", **environ: str) -> str:
    """Run Python with arguments, and with variables beside ours; return what it has printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
