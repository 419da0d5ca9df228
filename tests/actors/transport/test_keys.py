"""The cluster file is replaced on files of several hosts, with a crash amid each step of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.cluster import key_rotation as keys
from greenroom.actors.cluster.epoch_fence import EpochFence
from greenroom.actors.messages.control import HoldKeys, Superseded
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport import cluster_key as key_files
from greenroom.actors.transport.cluster_key import ClusterKeyError, KeyFiles, ensure_key
from greenroom.actors.transport.other_hosts import KEY_CHECK_S
from greenroom.core.cluster.hosts import HostState
from greenroom.core.cluster.key_rotation import KeyIds, next_step

EPOCH = 3  # of the controller


class Crash(BaseException):
    """The machine ends here."""


class Host:
    """One host's files and the end of the rotation that it has; ``a`` leads."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.path = cluster.folder / name / "cluster.key"
        self.settings = HostSettings(state_dir=self.path.parent, host_name=name)
        self.path.parent.mkdir()
        if name == "a":
            ensure_key(self.path)
        else:
            ensure_key(self.path, cluster.folder / "a" / "cluster.key")
        self.boot()

    def boot(self) -> None:
        """Begin anew, with what is on the disk."""
        self.handlers: dict[type, Callable[[Any, Any], None]] = {}
        loop = SimpleNamespace(
            send=lambda to, message: self.cluster.send(self.name, to, message),
            machine=SimpleNamespace(monotonic=lambda: self.cluster.now),
        )
        if self.name == "a":
            self.rotation = keys.KeyRotation(loop, self.cluster, self.settings, EPOCH)  # type: ignore[arg-type]
        else:
            port: Any = SimpleNamespace(on=self.handlers.__setitem__, loop=loop)
            obeys = EpochFence(loop).accepts  # type: ignore[arg-type]
            self.holder = keys.KeyHolder(self.settings, port, self.report, obeys)

    def report(self) -> None:
        self.cluster.all[self.name].said = SimpleNamespace(keys=tuple(KeyFiles(self.path).ids()))
        self.cluster.hosts["a"].rotation.reported(self.name)

    @property
    def keys(self) -> list[bytes]:
        return list(KeyFiles(self.path)())


class Known:
    """A host as the controller knows it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self.name = self.at = name
        self.said: Any = None

    @property
    def state(self) -> HostState:
        return HostState.LOST if self.name in self._cluster.lost else HostState.RUNNING


class Cluster:
    """Messages between hosts, one at a time, with a check after each; the controller's Hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue: deque[tuple[str, str, Any]] = deque()
        self.records: dict[str, None] = {"b": None, "c": None}
        self.all = {name: Known(self, name) for name in "abc"}
        self.own = self.all["a"]
        self.lost: set[str] = set()
        self.sent: list[Any] = []
        self.now = 100.0
        self.hosts = {name: Host(self, name) for name in "abc"}

    def send(self, sender: str, to: str, message: Any) -> None:
        self.sent.append(message)
        if not {sender, to} & self.lost:
            self.queue.append((sender, to, message))

    def converge(self) -> None:
        """Have hosts report until nothing is left to do."""
        for _ in range(8):
            for name in sorted(set("bc") - self.lost):
                self.hosts[name].report()
            while self.queue:
                sender, to, message = self.queue.popleft()
                self.hosts[to].handlers[type(message)](message, sender)
                self.check()

    def check(self) -> None:
        """What a host proves, each of the others takes."""
        present = [host for name, host in self.hosts.items() if name not in self.lost]
        for host in present:
            assert all(host.keys[0] in other.keys for other in present)

    def rotate(self, request_id: str = "1") -> Any:
        rotation = self.hosts["a"].rotation
        rotation.begin(request_id)
        self.converge()
        rotation.rotated()  # where it is so since just now, connections of before may be open
        self.now += KEY_CHECK_S
        return rotation.rotated()


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_all_hosts_come_to_one_new_key(cluster):
    before = cluster.hosts["a"].keys
    assert cluster.rotate() == {"hosts": ["a", "b", "c"], "away": []}
    (key,) = cluster.hosts["a"].keys
    assert [key] != before
    assert all(host.keys == [key] for host in cluster.hosts.values())
    assert cluster.rotate("1") == {"hosts": ["a", "b", "c"], "away": []}  # a repeat
    assert cluster.hosts["a"].keys == [key]
    cluster.rotate("2")
    assert cluster.hosts["c"].keys != [key]


def test_a_host_started_with_the_file_of_its_first_start_has_its_newer_key(cluster):
    given = cluster.folder / "given.key"
    ensure_key(given, cluster.hosts["a"].path)
    cluster.rotate()
    for host in cluster.hosts.values():
        assert ensure_key(host.path, given).startswith(host.keys[0])
    stranger = cluster.folder / "stranger.key"
    ensure_key(stranger)
    with pytest.raises(ClusterKeyError, match="if this cluster's was replaced"):
        ensure_key(cluster.hosts["b"].path, stranger)


def crash_at(number: int, folder: Path, patch: pytest.MonkeyPatch) -> list[int]:
    """Have the write of that number in a folder not happen; returns what is left."""
    real_write = key_files.write_key
    left = [number]

    def write(path: Path, text: bytes) -> None:
        if path.parent == folder:
            left[0] -= 1
            if not left[0]:
                raise Crash
        real_write(path, text)

    patch.setattr(key_files, "write_key", write)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_crash_at_any_step_of_a_host_leaves_a_cluster_that_works(name, tmp_path, monkeypatch):
    number, has_crashed = 0, True
    while has_crashed:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        cluster = Cluster(folder)
        before = cluster.hosts[name].keys
        with monkeypatch.context() as patch:
            left = crash_at(number, folder / name, patch)
            try:
                cluster.rotate()
            except Crash:
                cluster.queue.clear()
        has_crashed = not left[0]
        cluster.hosts[name].boot()
        cluster.check()
        cluster.converge()
        assert len({tuple(host.keys) for host in cluster.hosts.values()}) == 1
        assert len(cluster.hosts["a"].keys) == 1
        if number > 1:  # the first crash is before anything was written
            assert cluster.hosts[name].keys != before
    assert number == 4, "three steps"


def test_it_is_done_when_no_connection_of_before_is_open(cluster):
    rotation = cluster.hosts["a"].rotation
    rotation.begin("1")
    cluster.converge()
    for _ in range(2):
        assert rotation.rotated() is None
        cluster.now += KEY_CHECK_S / 2
    assert rotation.rotated() is not None


def test_a_controller_that_was_succeeded_turns_no_host_back(cluster):
    before, ids = cluster.hosts["b"].keys, KeyFiles(cluster.hosts["b"].path).ids()
    cluster.rotate()
    after = cluster.hosts["b"].keys
    cluster.sent.clear()
    late = HoldKeys(keys=ids, files=tuple(before), epoch=EPOCH - 1)  # it stood still meanwhile
    cluster.hosts["b"].handlers[HoldKeys](late, "former")
    assert cluster.hosts["b"].keys == after
    assert cluster.sent == [Superseded(epoch=EPOCH)]


def test_a_lost_host_is_not_waited_for(cluster):
    cluster.lost = {"c"}
    assert cluster.rotate() == {"hosts": ["a", "b"], "away": ["c"]}
    assert cluster.hosts["c"].keys[0] not in cluster.hosts["a"].keys


def test_a_host_that_is_back_while_its_key_is_taken_is_brought_along(cluster):
    cluster.lost = {"c"}
    cluster.hosts["a"].rotation.begin("1")  # b has not answered yet
    assert cluster.hosts["a"].rotation.rotated() is None
    cluster.lost = set()
    assert cluster.rotate("1") == {"hosts": ["a", "b", "c"], "away": []}


def test_a_host_that_was_evicted_is_given_nothing(cluster):
    cluster.converge()
    cluster.sent.clear()
    del cluster.records["c"], cluster.all["c"]
    cluster.queue.clear()
    cluster.hosts["a"].rotation.begin("1")
    cluster.hosts["b"].report()
    assert {to for _, to, _ in cluster.queue} == {"b"}


def test_a_step_waits_for_every_host():
    spreading = KeyIds("k", next="n")
    assert next_step(KeyIds("k"), [KeyIds("k")]) == KeyIds("k")
    assert next_step(spreading, [spreading, KeyIds("k")]) == spreading
    changed = next_step(spreading, [spreading, spreading])
    assert changed == KeyIds("n", last="k")
    assert next_step(changed, [changed, spreading]) == changed
    assert next_step(changed, [changed]) == KeyIds("n")
    assert next_step(spreading, []) == changed
