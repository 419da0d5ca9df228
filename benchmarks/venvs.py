"""A virtual environment for each system, made on first use and kept; Greenroom's is refreshed.

A stamp is written last, so an environment whose making was interrupted is made again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CLONE, BenchmarkError
from benchmarks.systems import GREENROOM, System

STAMP = "benchmark.json"
PIP_TIMEOUT_S = 1200
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
LIST_REQUIREMENTS = (
    "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1])))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Venv:
    """Where a system's commands are, and what its packages add to a bare environment."""

    bin: Path
    installed_bytes: int | None


def default_root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "greenroom-benchmarks"


def _run(command: list[str | Path], *, what: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{what} took more than {PIP_TIMEOUT_S} s") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BenchmarkError(f"{what} failed with exit code {done.returncode}:\n{tail}")
    return done.stdout


def _site_packages_bytes(folder: Path) -> int:
    site_packages = next((folder / "lib").glob("python*/site-packages"))
    return sum(p.lstat().st_size for p in site_packages.rglob("*") if not p.is_dir())


def _pip(folder: Path, *arguments: str | Path, what: str) -> None:
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, *arguments], what=f"{what} in {folder}")


def _create(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", folder], what=f"making the environment {folder}")
    return _site_packages_bytes(folder)


def _install(system: System, folder: Path) -> None:
    what = f"installing {', '.join(system.requirements)}"
    if not system.loosened:
        _pip(folder, "install", *system.requirements, what=what)
        return
    loosened, *others = system.requirements
    _pip(folder, "install", "--no-deps", loosened, what=what)
    name = loosened.partition("==")[0]
    listing = _run([folder / "bin" / "python", "-c", LIST_REQUIREMENTS, name], what=what)
    wanted = [r for r in json.loads(listing) if "extra ==" not in r]
    for loose in system.loosened:
        wanted = [loose if r.startswith(loose) else r for r in wanted]
    _pip(folder, "install", *wanted, *others, what=what)


def _stamp(folder: Path) -> dict:
    try:
        return json.loads((folder / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def prepare_peer(system: System, root: Path) -> Venv:
    """Return the peer's environment, made anew if it is missing or was made for other pins."""
    folder = root / system.name
    made_for = [*system.requirements, *system.loosened]
    stamp = _stamp(folder)
    if stamp.get("made_for") != made_for:
        print(f"installing {system.name} in {folder} ...", file=sys.stderr)
        bare = _create(folder)
        _install(system, folder)
        stamp = {"made_for": made_for, "installed_bytes": _site_packages_bytes(folder) - bare}
        (folder / STAMP).write_text(json.dumps(stamp))
    return Venv(bin=folder / "bin", installed_bytes=stamp["installed_bytes"])


def prepare_greenroom(root: Path, system: System = GREENROOM) -> Venv:
    """Install a wheel of the working tree, as it is now, into the system's environment."""
    folder = root / system.name
    stamp = _stamp(folder)
    if "bare_bytes" not in stamp:
        stamp = {"bare_bytes": _create(folder)}
        (folder / STAMP).write_text(json.dumps(stamp))
    print(f"installing the working tree in {folder} ...", file=sys.stderr)
    _pip(folder, "uninstall", "-y", "greenroom", what="removing the last build")
    with tempfile.TemporaryDirectory(prefix="greenroom-source-") as scratch:
        # From a copy: setuptools leaves build/ in the source, and takes stale modules from it.
        source = Path(scratch) / "source"
        shutil.copytree(CLONE, source, ignore=NOT_SOURCE)
        _pip(folder, "install", source, *system.requirements, what="installing the working tree")
    installed = _site_packages_bytes(folder) - stamp["bare_bytes"]
    return Venv(bin=folder / "bin", installed_bytes=installed)


def existing_greenroom(python: Path) -> Venv:
    """Use the `greenroom` command beside an interpreter that has it."""
    command = python.absolute().with_name("greenroom")
    if not command.exists():
        raise BenchmarkError(
            f"--greenroom-python {python}: no {command}; pip install Greenroom there first"
        )
    return Venv(bin=command.parent, installed_bytes=None)
