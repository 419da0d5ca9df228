"""What a disk that takes nothing does to a system: changes are refused, and all else goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import cannot_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
IN_A_NAMESPACE = ["unshare", "--mount", "sh", "-ec"]


def can_mount(folder: Path) -> str:
    """Return why no disk can be mounted here; "" where it can."""
    try:
        tried = subprocess.run(
            [*IN_A_NAMESPACE, 'mount -t tmpfs none "$0"', folder],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def test_changes_are_refused_while_the_disk_is_full_or_read_only_and_made_when_it_is_not(tmp_path):
    if reason := can_mount(tmp_path):
        cannot_run(f"no small disk can be mounted: {reason}")
    script = 'mount -t tmpfs -o size=4m,mode=700 none "$0"; exec "$@"'
    program = [sys.executable, "-m", "tests.actors.full_disk", tmp_path]
    ended = subprocess.run(
        [*IN_A_NAMESPACE, script, tmp_path, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
