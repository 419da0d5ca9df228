"""Other releases of Greenroom in folders, as wheels would unpack, to be named by PYTHONPATH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "core", "http_front", "persistence", "serve")
SHAPES = "tests/core/shapes.json"
# What the synthetic next release adds: in a file, behind the line that begins so, a field.
_QUERIES, _CONTROL = "actors/messages/queries.py", "actors/messages/control.py"
_REPORTED = '    """Replica to controller: its state, after any of the above."""'
_NEW_FIELDS = (
    (_QUERIES, '    follows: str = ""  #', 'added: str = "new"'),  # Query, a named tuple
    (_QUERIES, "    compare: tuple[CompareAt, ...] | None = ()", "added: int = 1"),  # Assignment
    (_CONTROL, _REPORTED, "added: int = 1"),  # ReplicaReported, a message
    ("core/records.py", "    target: int | None = None", 'added: str = "new"'),  # BackendRecord
    ("core/records.py", "    rank: int = 0", "added: int = 1"),  # ReplicaRecord
)


def last_release(folder: Path, version: str) -> bool:
    """Unpack the last release into ``folder``, as ``version``; return False without git.

    It is the commit that wrote the shapes of what travels: see docs/formats.md. In a shallow clone
    that is as far back as its history goes.
    """
    try:
        commit = _git("log", "-1", "--format=%H", "--", SHAPES).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return False
    if not commit:
        return False
    archive = _git("archive", commit, *PACKAGES)
    (folder / "greenroom").mkdir(parents=True)
    subprocess.run(["tar", "-x"], input=archive, cwd=folder / "greenroom", check=True)
    _name(folder, version)
    return True


def this_release(folder: Path, version: str) -> bool:
    """Unpack the tree as it is into ``folder``, as ``version``."""
    for package in PACKAGES:  # with what is compiled already
        shutil.copytree(ROOT / package, folder / "greenroom" / package)
    _name(folder, version)
    return True


def next_release(folder: Path, version: str) -> bool:
    """Make up a release after this one in ``folder``: the next format, and more fields."""
    this_release(folder, version)
    _change(folder, "core/formats.py", "\nFORMAT = ", "\nFORMAT = 1 + ")
    for path, line, added in _NEW_FIELDS:
        text = (folder / "greenroom" / path).read_text(encoding="utf-8")
        whole = next(each for each in text.splitlines() if each.startswith(line))
        _change(folder, path, f"{whole}\n", f"{whole}\n    {added}\n")
    return True


def broken_release(folder: Path, version: str) -> bool:
    """Make up a release whose host process cannot start."""
    this_release(folder, version)
    _change(folder, "actors/host/process.py", "\nimport os\n", "\nimport os_that_is_not_there\n")
    return True


def _change(folder: Path, path: str, old: str, new: str) -> None:
    file = folder / "greenroom" / path
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is not once in {path}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def _name(folder: Path, version: str) -> None:
    info = folder / f"greenroom-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: greenroom\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")


def _git(*args: str) -> bytes:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True).stdout
