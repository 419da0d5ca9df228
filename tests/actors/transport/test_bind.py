"""What a system listens on, with and without --bind, and what stands in the way of a bound one."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import psutil
import pytest

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime import settings as binding
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.transport.cluster_key import ensure_key
from greenroom.core.errors import InvalidRequestError, StartError
from tests.support.systems import RunningSystem, running_system, wait_until


@pytest.fixture(autouse=True)
def key_file_of_nobody(monkeypatch):
    """``prepare`` leaves it to child processes, which tests have too."""
    monkeypatch.setenv("GREENROOM_KEY_FILE", "")


def settings(state_dir: Path, **environ: str) -> HostSettings:
    state_dir.mkdir(exist_ok=True)
    return read_settings({"GREENROOM_STATE_DIR": str(state_dir), **environ})


def listeners(running: RunningSystem) -> set[tuple[str, int]]:
    """Return where the system's processes, and those under them, listen on TCP."""
    pids = {pid for _, pid in running.pids()}
    pids |= {child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)}
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids
    }


def test_a_system_listens_for_http_alone_unless_it_is_bound(own_system):
    assert listeners(own_system) == {("127.0.0.1", own_system.settings.http.port)}
    assert not own_system.settings.cluster_key.exists()


def test_a_bound_system_listens_on_its_address_shows_its_key_nowhere_and_is_found(tmp_path):
    with running_system(tmp_path / "state", GREENROOM_BIND="127.0.0.9") as running:
        bound, key = ("127.0.0.9", running.settings.admin_port), running.settings.cluster_key
        assert listeners(running) == {("127.0.0.1", running.settings.http.port), bound}
        (host,) = wait_until(lambda: running.status()["hosts"], 5, "the host reports itself")
        assert host["address"] == running.settings.own_address == "{}:{}".format(*bound)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        secret = key.read_bytes().splitlines()[1]  # of the private key
        places = [f"/proc/{pid}/{each}" for _, pid in running.pids() for each in PUBLIC]
        places += [*running.settings.logs_dir.iterdir(), *running.settings.run_dir.iterdir()]
        assert len(places) > 10
        for place in map(Path, places):
            with contextlib.suppress(FileNotFoundError):  # a record that was half-written by then
                assert secret not in place.read_bytes(), place
        del running.environ["GREENROOM_BIND"]
        way = ("--address", host["address"], "--key-file", str(key))
        for options in ((), ("--state-dir", str(tmp_path / "elsewhere"), *way)):
            shown = running.greenroom("status", *options)
            assert shown.returncode == 0, shown.stderr


PUBLIC = ("cmdline", "environ")


def members_of(running: RunningSystem) -> list[str]:
    """Return the addresses of the other hosts that run."""
    own = running.settings.own_address
    hosts = running.status()["hosts"]
    return [h["address"] for h in hosts if h["state"] == "RUNNING" and h["address"] != own]


@pytest.mark.slow
def test_hosts_with_one_key_join_and_with_another_are_refused_with_a_line(tmp_path):
    with running_system(tmp_path / "a", GREENROOM_BIND="127.0.0.9") as leader:
        leads = leader.settings.own_address
        joining = {"GREENROOM_BIND": "127.0.0.8", "GREENROOM_JOIN": leads}
        joining["GREENROOM_HOST_NAME"] = "another"
        key = {"GREENROOM_KEY_FILE": str(leader.settings.cluster_key)}
        with running_system(tmp_path / "b", **joining, **key) as member:
            wait_until(lambda: members_of(leader) == [member.settings.own_address], 10, "joined")
            assert member.settings.cluster_key.read_bytes() == Path(*key.values()).read_bytes()
        wait_until(lambda: not members_of(leader), 10, "left")
        without = RunningSystem(tmp_path / "c", **joining, GREENROOM_KEY_FILE="")
        with pytest.raises(StartError, match=r"without the cluster file: copy cluster\.key from"):
            without.start()
        other_key = tmp_path / "other.key"
        ensure_key(other_key)
        other = RunningSystem(tmp_path / "c", **joining, GREENROOM_KEY_FILE=str(other_key))
        refused = f"cannot join {leads}: its certificate is not this cluster's"
        with pytest.raises(StartError, match=refused):
            other.start()
        assert not other.pids()
        assert not other.settings.cluster_key.exists(), "or the right one would be refused"
        assert members_of(leader) == []
        log, said = leader.settings.logs_dir / "host.log", "it refuses this host's certificate"
        wait_until(lambda: said in log.read_text(), 5, "a line")
        assert log.read_text().count(said) == 1


@pytest.mark.slow
def test_a_host_whose_name_is_taken_is_refused_naming_the_other(tmp_path):
    with running_system(tmp_path / "a", GREENROOM_BIND="127.0.0.9") as leader:
        leads = leader.settings.own_address
        other = RunningSystem(
            tmp_path / "b",
            GREENROOM_BIND="127.0.0.8",
            GREENROOM_JOIN=leads,
            GREENROOM_KEY_FILE=str(leader.settings.cluster_key),
        )
        with pytest.raises(StartError, match=f"{leads}: host name .* is taken by .*--host-name"):
            other.start()
        assert len(leader.status()["hosts"]) == 1


def test_somebody_elses_address_cannot_be_bound(tmp_path):
    with pytest.raises(StartError, match=r"cannot listen on 192.0.2.1: .*an address of this host"):
        binding.prepare(settings(tmp_path, GREENROOM_BIND="192.0.2.1"))


def test_a_host_that_is_not_bound_starts_over_without_a_cluster_file(tmp_path):
    own = str(tmp_path / "cluster.key")  # which the first start has put into the environment
    binding.prepare(settings(tmp_path, GREENROOM_KEY_FILE=own))
    assert not (tmp_path / "cluster.key").exists()


def test_a_host_that_cannot_be_found_is_named(tmp_path):
    joined = settings(
        tmp_path, GREENROOM_BIND="127.0.0.9", GREENROOM_JOIN="no.such.host.invalid:1900"
    )
    with pytest.raises(StartError, match=r"cannot join no.such.host.invalid:1900"):
        binding.resolved_gates(joined)


def test_a_key_that_cannot_be_used_stops_the_start(tmp_path):
    (tmp_path / "cluster.key").write_bytes(b"short")
    (tmp_path / "cluster.key").chmod(0o600)
    with pytest.raises(StartError, match="does not hold a private key and a certificate"):
        binding.prepare(settings(tmp_path, GREENROOM_BIND="127.0.0.9"))


@pytest.mark.parametrize(("text", "mode"), [(b"short", 0o600), (None, 0o644), (b"", 0o600)])
def test_a_client_hears_that_its_key_cannot_be_used(tmp_path, text, mode):
    key = tmp_path / "given.key"
    ensure_key(key)
    if text is not None:
        key.write_bytes(text)
    key.chmod(mode)
    asked = settings(tmp_path, GREENROOM_ADDRESS="127.0.0.9:1900", GREENROOM_KEY_FILE=str(key))
    with pytest.raises(InvalidRequestError, match=f"the cluster file {key} "):
        Connection.open(asked)


def test_a_key_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    theirs = settings(tmp_path)
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(
        InvalidRequestError, match=rf"{theirs.cluster_key} cannot be looked at: Per"
    ):
        binding.access_to(theirs)


def test_a_joining_host_copies_the_key_that_it_is_given(tmp_path):
    first = settings(tmp_path / "a", GREENROOM_BIND="127.0.0.9")
    binding.prepare(first)
    second = settings(tmp_path / "b", GREENROOM_KEY_FILE=str(first.cluster_key))
    binding.prepare(second)
    assert second.cluster_key.read_bytes() == first.cluster_key.read_bytes()
