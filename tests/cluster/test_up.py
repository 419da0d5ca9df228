"""``greenroom up``: bare machines with sshd become one cluster, and what differs is changed."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import releases, wheels
from tests.support.machines import Machines, machines_of

APP = """
from greenroom import serve

@serve.deployment(num_replicas=5, max_replicas_per_host=2, max_ongoing_requests=20)
class Who:
    def __call__(self, request):
        return "served"

app = Who.bind()
"""
APPS = "applications: [{name: who, route_prefix: /, import_path: 'who:app'}]\n"


@pytest.fixture(scope="module", name="wheelhouse")
def write_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases of Greenroom, and what both need."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    wheels.write_needed(folder / "needed", "cluster")
    for version in ("0.0.2", "0.0.3"):
        releases.this_release(folder / version, version)
        (folder / f"of-{version}").mkdir()
        wheels.write_release(folder / f"of-{version}", folder / version, version)
    return folder


@pytest.fixture
def five(tmp_path: Path, wheelhouse: Path) -> Iterator[Machines]:
    """Five machines that have Python and sshd."""
    with machines_of(5, tmp_path) as machines:
        (tmp_path / "apps").mkdir()
        (tmp_path / "apps" / "who.py").write_text(APP)
        (tmp_path / "apps" / "apps.yaml").write_text(APPS)
        take(machines, wheelhouse, "0.0.2")
        yield machines


def take(machines: Machines, wheelhouse: Path, version: str) -> None:
    """Have a release in the folder of wheels."""
    folder = machines.folder / "wheels"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path in (*(wheelhouse / "needed").iterdir(), *(wheelhouse / f"of-{version}").iterdir()):
        (folder / path.name).hardlink_to(path)


def test_five_bare_machines_serve_within_two_minutes(five: Machines) -> None:
    five.write("abcde", deploy="apps/apps.yaml")
    began_at = time.monotonic()
    shown = five.check("up")
    took_s = time.monotonic() - began_at
    assert took_s < 120, shown
    assert shown.endswith("5 hosts run greenroom 0.0.2\n")
    for host in five.hosts:
        assert host.get() == (200, "served")
        assert not stat.S_IMODE(five.home(host.label).stat().st_mode) & 0o077
    assert five.run("up", "--plan") == (0, "nothing would change\n", "")
    assert five.check("up") == "nothing to change: 5 hosts run greenroom 0.0.2\n"
