"""What is wrong with a machine, ``greenroom up`` names with the host; a later run goes on."""

from __future__ import annotations

import re
import socket
import subprocess

import pytest

from tests.support import releases, wheels
from tests.support.cluster import HTTP_PORT, cluster_of
from tests.support.machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # as in test_up.py


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """One machine, bare until the last test."""
    folder = tmp_path_factory.mktemp("bare")
    with cluster_of(2, folder) as cluster:
        (folder / "wheels").mkdir()
        wheels.write_wheel(folder / "wheels", "greenroom", "0.0.2", "")
        yield Machines(cluster, folder)


@pytest.fixture(name="small_disk")
def mount_small(bare):
    """The machine's folder on a disk that is too small."""
    home = bare.home("a")
    home.mkdir(exist_ok=True)  # an installation that failed may be below
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(home)], check=True)
    yield home
    subprocess.run(["umount", "--lazy", str(home)], check=True)  # what uses it is yet to end


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"ssh": "nobody@10.77.0.1"}, "ssh does not come to nobody@10.77.0.1: .*Permission denied"),
        ({"ssh": "ssh://10.77.0.1:23"}, "ssh does not come to .*Connection refused.*then repeat"),
        ({"python": "/no/python"}, "no Python can be run as '/no/python' .*; install Python 3.11"),
        ({"dir": "/proc/greenroom"}, "/proc/greenroom: No such file or directory; mend that, or"),
    ],
    ids=["a wrong user", "no sshd", "no Python", "a folder that cannot be made"],
)
def test_a_host_that_cannot_be_used_is_named_with_what_to_do(bare, entry, message):
    bare.write("a", hosts={"a": entry})
    code, _, error = bare.run("up")
    assert code == 1
    assert re.search(message, error), error
    assert error.startswith("Error: host 'a': ")
    assert not bare.home("a").exists()


def test_a_wrong_key_is_reported_with_the_command_to_try(bare):
    bare.write("a")
    keys = bare.folder / "authorized_keys"
    own = keys.read_text()
    keys.write_text((bare.folder / "host_key.pub").read_text())
    code, _, error = bare.run("up")
    keys.write_text(own)
    assert code == 1
    assert "host 'a': ssh does not come to 10.77.0.1: root@10.77.0.1: Permission denied" in error
    assert "see that `ssh 10.77.0.1 true` works and asks nothing" in error


def test_wheels_that_do_not_fit_are_reported_in_the_installers_words(bare):
    parrot = wheels.write_wheel(bare.folder / "wheels", "parrot", "1.0", "", requires="grain")
    bare.write("a")
    code, _, error = bare.run("up")
    parrot.unlink()
    assert code == 1
    assert "host 'a': " in error
    assert "grain" in error


def test_a_host_with_one_trouble_after_the_other_is_served_by_the_last_run(bare, small_disk):
    """A full disk, a cable that is pulled, a busy port, another system: each is told."""
    (bare.folder / "wheels" / "greenroom-0.0.2-py3-none-any.whl").unlink()
    wheels.write_needed(bare.folder / "wheels", "cluster")
    releases.this_release(bare.folder / "release", "0.0.2")
    wheels.write_release(bare.folder / "wheels", bare.folder / "release", "0.0.2")
    bare.write("a")
    (host,) = bare.hosts

    code, _, error = bare.run("up")
    assert (code, error.startswith("Error: host 'a': ")) == (1, True)
    assert "No space left on device" in error
    subprocess.run(["mount", "-o", "remount,size=500m", str(small_disk)], check=True)

    with bare.begin("up") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "a: installing" not in process.stdout.readline():
            assert process.poll() is None
        host.cut()
        error = process.stderr.read()
    assert process.returncode == 1
    assert "host 'a': ssh does not come to 10.77.0.1: " in error
    host.heal()

    host.call(_take_port)
    code, shown, error = bare.run("up")
    assert "a: installed" in shown
    assert (code, error.startswith("Error: host 'a': ")) == (1, True)
    assert f"port {HTTP_PORT}" in error
    host.call(_give_port)

    own, host.state_dir = host.state_dir, bare.folder / "by-hand"
    host.start(GREENROOM_HTTP_PORT="8001")
    code, shown, error = bare.run("up")
    assert (code, error.startswith("Error: host 'a': ")) == (1, True)
    assert "1900" in error
    host.check("stop")
    host.state_dir = own

    shown = bare.check("up")
    assert "installing" not in shown
    assert shown.endswith("1 host runs greenroom 0.0.2\n")
    assert host.get("/-/healthz")[0] == 200


_taken: list[socket.socket] = []


def _take_port() -> None:
    """Listen where the front is to. Called on a host."""
    _taken.append(socket.create_server(("0.0.0.0", HTTP_PORT)))


def _give_port() -> None:
    """End that. Called on a host."""
    _taken.pop().close()
