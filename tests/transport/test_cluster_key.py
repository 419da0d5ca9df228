from __future__ import annotations

import errno
import os
import stat
import sys
from multiprocessing.pool import ThreadPool

import pytest

from greenroom.actors.transport import cluster_key
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.cluster_key import (
    ClusterKeyError,
    KeyFiles,
    create_key,
    ensure_key,
    key_id,
    keys_of,
    make_key,
    read_key,
    write_key,
)
from greenroom.core.cluster.key_rotation import KeyIds


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cluster.key"


def test_the_first_start_makes_a_key_and_later_ones_keep_it(path):
    key = ensure_key(path)
    assert key_id(key) != key_id(ensure_key(path.with_name("other")))
    assert ensure_key(path) == read_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir() if each.name.startswith(".")] == []


def test_a_mask_that_takes_nothing_away_still_gives_a_private_file(path):
    before = os.umask(0)
    try:
        ensure_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_that_start_at_once_have_the_same_key(path):
    with ThreadPool(8) as pool:
        keys = pool.map(ensure_key, [path] * 8)
    assert len(set(keys)) == 1


def test_a_joining_host_gets_the_key_by_file(path):
    key = ensure_key(path)
    there = path.with_name("there")
    assert ensure_key(there, path) == ensure_key(there, path) == ensure_key(there) == key
    assert ensure_key(there, there) == key


def test_a_host_that_has_another_key_says_so(path):
    ensure_key(path)
    other = path.with_name("other")
    ensure_key(other)
    with pytest.raises(
        ClusterKeyError, match=f"--key-file {other} is not the cluster file .* in {path}"
    ):
        ensure_key(path, other)


@pytest.mark.parametrize(
    ("has_key", "text"),
    [
        *((False, text) for text in (b"", b"-----BEGIN CERTIFICATE-----", b"\xff" * 99)),
        *((True, text) for text in (b"# next\nno key\n", b"# last\n-----BEGIN CERTIFICATE-")),
    ],
)
def test_a_file_without_keys_and_certificates_is_refused(path, has_key, text):
    create_key(path, make_key() * has_key + text)
    with pytest.raises(ClusterKeyError, match=r"does not hold a private key and a certificate"):
        KeyFiles(path)


def test_a_key_that_does_not_fit_its_certificate_is_refused(path):
    one, other = (make_key().decode().partition("-----BEGIN CERT") for _ in range(2))
    create_key(path, (one[0] + other[1] + other[2]).encode())
    with pytest.raises(ClusterKeyError, match=r"cannot be used, .*(?i:mismatch)"):
        KeyFiles(path)
    mine = path.with_name("mine")
    with pytest.raises(ClusterKeyError, match="cannot be used"):
        ensure_key(mine, path)
    assert not mine.exists(), "what cannot be used is not copied"


def test_a_file_can_be_made_only_with_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ClusterKeyError, match=r"pip install 'greenroom\[cluster\]'"):
        ensure_key(path)
    assert not path.exists()


def test_a_file_that_becomes_unusable_leaves_what_was_read_in_use(path, caplog):
    key = ensure_key(path)
    files = KeyFiles(path)
    before = files.tls()
    path.write_bytes(b"half a key")
    assert list(files()) == [key]
    assert files.tls() is before
    assert "what it held before stays in use" in caplog.text
    write_key(path, new := make_key())
    assert list(files()) == [new]
    assert files.tls().own not in before.taken


def test_a_file_that_changes_amid_a_lack_of_descriptors_is_read_once_there_are_some(
    path, monkeypatch, caplog
):
    ensure_key(path)
    files = KeyFiles(path)
    before = files.tls()
    write_key(path, new := make_key())

    def fails(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        for _ in range(3):
            assert files.tls() is before
    assert list(files()) == [new]
    assert files.tls().own not in before.taken
    assert caplog.text.count("Too many open files") == 1


def test_a_file_holds_what_it_is_asked_to_and_remembers_what_was_replaced(path):
    first = ensure_key(path).rstrip()  # as an editor may leave it
    path.write_bytes(first)
    files = KeyFiles(path)
    files.begin()
    files.begin()
    current, following = files()
    assert current.strip() == first
    assert files.ids() == KeyIds(key_id(first), next=key_id(following))
    files.hold(KeyIds(key_id(following), last=key_id(first)))
    assert files.ids() == KeyFiles(path).ids() == KeyIds(key_id(following), last=key_id(first))
    assert len(files.tls().taken) == 2
    files.hold(KeyIds(key_id(following)))
    assert [key_id(each) for each in files()] == [key_id(following)]
    given = path.with_name("given")
    write_key(given, first)
    assert ensure_key(path, given) == path.read_bytes()
    with pytest.raises(ClusterKeyError, match=f"{key_id(first)} is not here"):
        files.hold(KeyIds(key_id(first)))


def test_a_file_that_is_copied_amid_a_replacing_is_taken(path):
    ensure_key(path)
    KeyFiles(path).begin()
    there = path.with_name("there")
    ensure_key(there, path)
    assert KeyFiles(there).ids() == KeyFiles(path).ids()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_can_use_is_refused(path, mode):
    ensure_key(path)
    path.chmod(mode)
    with pytest.raises(ClusterKeyError, match=f"has mode {mode:04o}.*chmod 600"):
        ensure_key(path)


def test_a_key_of_somebody_else_is_refused(path, monkeypatch):
    ensure_key(path)
    monkeypatch.setattr(cluster_key.os, "geteuid", lambda: 4242)
    with pytest.raises(ClusterKeyError, match=r"belongs to user .*, not to user 4242"):
        read_key(path)


def test_a_key_that_is_missing_or_no_file_is_refused(path):
    with pytest.raises(ClusterKeyError, match=r"No such file.*--key-file"):
        read_key(path)
    with pytest.raises(ClusterKeyError, match="No such file"):
        ensure_key(path, path.with_name("given"))
    assert not path.exists()
    os.mkfifo(path)
    with pytest.raises(ClusterKeyError, match="no regular file"):
        read_key(path)
    with pytest.raises(ClusterKeyError, match="no regular file"):
        read_key(path.parent)


def test_a_full_disk_leaves_the_file_and_no_other(path, monkeypatch):
    key = ensure_key(path)

    def fails(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    for write in (write_key, create_key):
        with pytest.raises(ClusterKeyError, match="No space left"):
            write(path, b"another")
    assert [each.read_bytes() for each in path.parent.iterdir()] == [key]


def test_a_folder_that_cannot_be_written_is_named(path):
    with pytest.raises(ClusterKeyError, match=r"cannot be made: No such file"):
        ensure_key(path.parent / "missing" / "cluster.key")


def test_a_bound_host_has_the_files_that_its_environment_names(path):
    key = ensure_key(path)
    environ = {"GREENROOM_KEY_FILE": str(path)}
    for own in (ProcessAddress("10.0.0.1", 1900), drawn_address("10.0.0.1", 1900)):
        files = keys_of(own, environ)
        assert files is not None
        assert list(files()) == [key]
    assert keys_of(ProcessAddress("127.0.0.1", 1900), environ) is None


def test_only_an_admin_insists_on_a_cluster_file():
    with pytest.raises(ClusterKeyError, match="GREENROOM_KEY_FILE"):
        keys_of(ProcessAddress("10.0.0.1", 1900), {})
    assert keys_of(drawn_address("10.0.0.1", 1900), {}) is None
