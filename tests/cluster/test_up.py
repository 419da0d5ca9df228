"""``greenroom up``: bare machines with sshd become one cluster, and what differs is changed."""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import releases, wheels
from tests.support.cluster import HTTP_PORT, cluster_of
from tests.support.kept import Kept
from tests.support.machines import Machines
from tests.support.systems import listens

# The first one brings five machines up, and a machine with other work has to do that too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
APP = """
from greenroom import serve

@serve.deployment(num_replicas=3, max_ongoing_requests=20)
class Who:
    def __call__(self, request):
        return "served"

app = Who.bind()
"""
APPS = "applications: [{name: who, route_prefix: /, import_path: 'who:app'}]\n"


RELEASES = {
    "0.0.2": releases.this_release,
    "0.0.3": releases.this_release,
    "0.0.4": releases.broken_release,
}
LOAD: dict[str, Any] = {"connections": 4, "pause_s": 0.02}


@pytest.fixture(scope="module", name="wheelhouse")
def write_wheels(tmp_path_factory):
    """Releases of Greenroom, and what they need."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    wheels.write_needed(folder / "needed", "cluster")
    for version, make in RELEASES.items():
        make(folder / version, version)
        (folder / f"of-{version}").mkdir()
        wheels.write_release(folder / f"of-{version}", folder / version, version)
    return folder


class Fleet(Machines):
    """Machines, and an application for them."""

    version = "0.0.2"
    labels = ""
    took_s = 0.0  # from bare to serving

    def want(self, wheelhouse: Path, labels: str, version: str = "", **document: Any) -> None:
        """Have the wheels of a release, by default the last one, and a file with these hosts."""
        version, self.labels = version or self.version, labels
        folder = self.folder / "wheels"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in (*(wheelhouse / "needed").iterdir(), *(wheelhouse / f"of-{version}").iterdir()):
            (folder / path.name).hardlink_to(path)
        (self.folder / "apps").mkdir(exist_ok=True)
        (self.folder / "apps" / "who.py").write_text(APP)
        (self.folder / "apps" / "apps.yaml").write_text(APPS)
        self.write(labels, deploy="apps/apps.yaml", **document)

    def other(self) -> str:
        """Return the release that it does not have, and take it for the one that it has."""
        self.version = "0.0.3" if self.version == "0.0.2" else "0.0.2"
        return self.version

    def releases(self) -> dict[str, str]:
        """Return the release of each host that runs, as the first host tells."""
        hosts = self.hosts[0].status()["hosts"]
        return {h["name"]: h["release"].split(",")[0] for h in hosts if h["state"] == "RUNNING"}

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """GET through the balancer meanwhile: each is answered with 200."""
        with self.operator.load(**LOAD) as end:
            yield
            tally = end()
        assert tally.ok > 50, tally.summary()
        assert not tally.failures, tally.summary()


def running(version: str, labels: str) -> dict[str, str]:
    return dict.fromkeys(labels, f"greenroom {version}")


@pytest.fixture(scope="module", name="kept")
def keep(tmp_path_factory, wheelhouse):
    @contextlib.contextmanager
    def make() -> Iterator[Fleet]:
        folder = tmp_path_factory.mktemp("machines")
        with cluster_of(6, folder) as cluster:
            fleet = Fleet(cluster, folder)
            fleet.want(wheelhouse, "abcde")
            began_at = time.monotonic()
            shown = fleet.check("up")
            fleet.took_s = time.monotonic() - began_at
            assert shown.endswith("5 hosts run greenroom 0.0.2\n")
            fleet.balance()
            yield fleet

    def restore(fleet: Fleet) -> None:
        fleet.want(wheelhouse, fleet.labels)
        fleet.check("up")

    kept = Kept(make, restore)
    yield kept
    kept.end()


@pytest.fixture(name="fleet")
def lend(request, kept):
    """Five machines that serve; three, once two of them have left."""
    with kept.lent(request) as fleet:
        yield fleet


def test_bare_machines_serve_within_two_minutes(fleet):
    assert fleet.took_s < 120
    for host in fleet.hosts:
        assert host.get() == (200, "served")
        assert not stat.S_IMODE(fleet.home(host.label).stat().st_mode) & 0o077
    assert fleet.run("up", "--plan") == (0, "nothing would change\n", "")
    assert fleet.check("up") == f"nothing to change: 5 hosts run greenroom {fleet.version}\n"


def test_hosts_that_leave_the_file_are_drained_and_removed(fleet, wheelhouse):
    fleet.want(wheelhouse, "abc")
    would = [f"{label}: drain, stop and remove, as the file does not name it\n" for label in "de"]
    assert fleet.run("up", "--plan")[:2] == (3, "".join(would))
    with fleet.loaded():
        shown = fleet.check("up")
    done = ["d: drained", "d: removed", "e: drained", "e: removed"]
    assert re.findall(r"^([de]: (?:drained|removed))$", shown, re.MULTILINE) == done
    assert fleet.releases() == running(fleet.version, "abc")
    assert not any(fleet.home(label).exists() for label in "de")


def test_an_upgrade_goes_host_by_host_under_load_the_leader_last(fleet, wheelhouse):
    fleet.want(wheelhouse, "abc", fleet.other())
    code, shown, _ = fleet.run("up", "--plan")
    assert code == 3
    would = [[f"{label}:", "restart"] for label in "bca"]
    assert [line.split()[:2] for line in shown.splitlines()[3:]] == would
    with fleet.loaded():
        shown = fleet.check("up")
    assert re.findall(r"^(\w): restarting", shown, re.MULTILINE) == ["b", "c", "a"]
    assert fleet.releases() == running(fleet.version, "abc")


def test_a_host_that_does_not_become_healthy_goes_back_and_the_others_are_left(fleet, wheelhouse):
    fleet.want(wheelhouse, "abc", "0.0.4")
    with fleet.loaded():
        code, shown, output = fleet.run("up")
    assert code == 1
    done = [("b", "restarting"), ("b", "going back")]
    assert re.findall(r"^(\w): (restarting|going back)", shown, re.MULTILINE) == done
    assert "host 'b': the host process died at its start; see logs/host.log" in output
    assert "No module named 'os_that_is_not_there'" in output
    assert f"host 'b' is back at {fleet.version}-" in output
    assert fleet.releases() == running(fleet.version, "abc")
    fleet.want(wheelhouse, "abc")
    assert fleet.run("up", "--plan")[0] == 0


def test_down_stops_all_and_up_brings_all_back(fleet, wheelhouse):
    assert sorted(fleet.check("down").splitlines()) == [f"{label}: stopped" for label in "abc"]
    for host in fleet.hosts[:3]:
        assert not host.call(listens, HTTP_PORT, host.address)
    fleet.want(wheelhouse, "abc", hosts={"c": {"settings": {"resources": "disk=2"}}})
    shown = fleet.run("up", "--plan")[1]
    would = ["a: start, as it does not run", "b: start, as it does not run"]
    assert shown.splitlines()[:3] == [*would, "c: restart with other settings"]
    fleet.check("up")
    assert [host.get() for host in fleet.hosts[:3]] == [(200, "served")] * 3
    hosts = {host["name"]: host for host in fleet.hosts[0].status()["hosts"]}
    assert hosts["c"]["resources"]["disk"]["total"] == 2


def test_a_command_that_is_killed_goes_on_where_it_was(fleet, wheelhouse):
    fleet.want(wheelhouse, "abc", fleet.other())
    for when in ("installing", "restarting"):
        with fleet.begin("up") as process:
            assert process.stdout is not None
            while f"b: {when}" not in process.stdout.readline():
                assert process.poll() is None
            process.kill()
    fleet.check("up")
    assert fleet.releases() == running(fleet.version, "abc")
    assert fleet.run("up", "--plan")[0] == 0
