"""What every store does, whatever it keeps its values in."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from greenroom.persistence import filesystem
from greenroom.persistence.filesystem import FileLocation
from greenroom.persistence.kv import MAX_KEY_BYTES, KVStore, MemoryStore, StoreClosedError
from greenroom.persistence.locations import location_at
from tests.support.postgres import PostgresServer

from .disks import LOGS, open_store  # noqa: TID251 - the tests' own folder

ODD_KEYS = [
    "a",
    ".",
    "..",
    ".hidden.tmp",
    "=",
    "%2E",
    "backend/resnet:v2",
    "endpoint/default#hello",
    "code/" + "0" * 64,
    "/leading/and/trailing/",
    "new\nline and space",
    "Größe/模型/🎭",
    "e\u0301 is not \u00e9",
    "/" * MAX_KEY_BYTES,
    "é" * (MAX_KEY_BYTES // 2),
    "x" * MAX_KEY_BYTES,
]


@pytest.fixture(name="store", params=["in memory", "on disk", "in a database"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    store: KVStore
    if request.param == "in a database":
        server = request.getfixturevalue("postgres")
        store = location_at(server.new_database()).open()
    else:
        store = MemoryStore() if request.param == "in memory" else FileLocation(tmp_path).open()
    yield store
    store.close()


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("x" * (MAX_KEY_BYTES + 1), "at most 180"),
        ("é" * (MAX_KEY_BYTES // 2 + 1), "182 bytes"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_key_that_cannot_be_is_refused(store: KVStore, key: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        store.get(key)
    with pytest.raises(ValueError, match=reason):
        store.apply({"a": b"1", key: b"2"})
    with pytest.raises(ValueError, match=reason):
        store.apply({"a": b"1"}, [key])
    assert store.load() == {}


def test_a_key_both_put_and_deleted_is_refused(store: KVStore) -> None:
    with pytest.raises(ValueError, match=r"\['a'\] are both"):
        store.apply({"a": b"1", "b": b"2"}, ["a"])
    assert store.load() == {}


@pytest.mark.parametrize("value", ["text", bytearray(b"1"), None])
def test_a_value_that_is_not_bytes_is_refused(store: KVStore, value: bytes) -> None:
    with pytest.raises(TypeError, match="expected bytes"):
        store.apply({"a": b"1", "b": value})
    assert store.load() == {}


def test_a_closed_store_refuses_every_call(store: KVStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.get("a")
    with pytest.raises(StoreClosedError):
        store.load()
    with pytest.raises(StoreClosedError):
        store.apply({"a": b"1"})


def test_a_large_value_is_returned_whole(store: KVStore) -> None:
    large = bytes(range(256)) * (20 * 4096)
    store.apply({"large": large, "small": b"1"})
    assert store.get("large") == large


class StoresAgainstADict(RuleBasedStateMachine):
    """All stores, and what lasts after reopening, do what a dict does."""

    keys = Bundle("keys")
    url: str  # of a database for all of them, each of which has a namespace there
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.model: dict[str, bytes] = {}
        self.memory = MemoryStore()
        self.files = open_store(Path(self.folder.name))
        self.database = location_at(self.url, f"namespace {next(self.numbers)}")
        self.rows = self.database.open()

    @rule(
        target=keys,
        key=st.one_of(
            st.sampled_from(ODD_KEYS),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=45),
        ),
    )
    def choose_a_key(self, key: str) -> str:
        return key

    @rule(
        puts=st.dictionaries(keys, st.binary(max_size=20), max_size=4),
        deletes=st.lists(keys, max_size=3),
    )
    def apply(self, puts: dict[str, bytes], deletes: list[str]) -> None:
        deletes = [key for key in deletes if key not in puts]
        self.memory.apply(puts, deletes)
        self.files.apply(puts, deletes)
        self.rows.apply(puts, deletes)
        self.model.update(puts)
        for key in deletes:
            self.model.pop(key, None)

    @rule(prefix=st.sampled_from(["", ".", "b", "backend/", "é", "/"]))
    def load(self, prefix: str) -> None:
        expected = sorted((k, v) for k, v in self.model.items() if k.startswith(prefix))
        for store in (self.memory, self.files, self.rows):
            assert list(store.load(prefix).items()) == expected

    @rule()
    def reopen(self) -> None:
        epoch = self.files.epoch
        self.files.close()
        self.files = open_store(Path(self.folder.name))
        assert self.files.epoch == epoch + 1
        self.rows.close()
        self.rows = self.database.open()
        assert self.rows.epoch == epoch + 1

    @invariant()
    def values_are_those_of_the_dict(self) -> None:
        for store in (self.memory, self.files, self.rows):
            assert store.load() == self.model

    def teardown(self) -> None:
        self.files.close()
        self.rows.close()
        self.folder.cleanup()


@pytest.mark.parametrize("logs", LOGS)
def test_stores_do_what_a_dict_does(
    postgres: PostgresServer, logs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LOGS[logs].items():
        monkeypatch.setattr(filesystem, name, value)
    StoresAgainstADict.url = postgres.new_database()
    run_state_machine_as_test(
        StoresAgainstADict,
        settings=settings(max_examples=15, stateful_step_count=12, database=None),
    )
