"""Records and code come back as they were saved, or are refused by name."""

import enum
import os
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from greenroom.core.formats import FORMAT, OLDEST, SHAPES
from greenroom.core.records import CODE
from greenroom.persistence.checkpoints import Checkpoints, code_digest
from greenroom.persistence.kv import (
    CorruptValueError,
    KVStore,
    MemoryStore,
    OtherFormatError,
    RecordRefusedError,
    StoreError,
)

from .disks import damage_value, open_store, places_in  # noqa: TID251 - the tests' own folder

VERSION = struct.pack(">I", FORMAT)  # before each record
PLAIN_RECORDS = [
    None,
    {"a": [1, 2.5, True, "é", b"b"], "t": (1, {2}, frozenset({3}))},
    [bytearray(b"1"), complex(1, 2), range(3), slice(1, 2), list, int],
    [Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1]), deque([1], maxlen=3)],
    [date(2024, 2, 29), datetime(2024, 2, 29, tzinfo=UTC), time(1, 2), timedelta(1)],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    tag: str
    replicas: int


class Phase(enum.Enum):
    RUNNING = "running"


@pytest.fixture(name="ours", autouse=True)
def pretend_ours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the classes above into a module of ours, and others within its reach."""
    module = ModuleType("greenroom.pretended")
    for each in (Backend, Phase):
        monkeypatch.setattr(each, "__module__", module.__name__)
        setattr(module, each.__name__, each)
        monkeypatch.setitem(SHAPES, f"{module.__name__}.{each.__name__}", each)
    module.os = os  # type: ignore[attr-defined]
    module.Decimal = Decimal  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture(name="store", params=["in memory", "on disk"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    store: KVStore = MemoryStore() if request.param == "in memory" else open_store(tmp_path)
    yield store
    store.close()


@pytest.fixture(name="checkpoints")
def make_checkpoints(store: KVStore) -> Checkpoints:
    return Checkpoints(store)


class RecordingStore(MemoryStore):
    """Counts the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[set[str], set[str]]] = []

    def apply(self, puts: Any, deletes: Any = ()) -> None:
        self.changes.append((set(puts), set(deletes)))
        super().apply(puts, deletes)


@pytest.mark.parametrize("record", PLAIN_RECORDS)
def test_plain_records_come_back_equal(checkpoints: Checkpoints, record: object) -> None:
    checkpoints.save({("goal", "1"): record})
    assert checkpoints.load("goal") == {"1": record}


def test_records_of_our_classes_come_back_equal(checkpoints: Checkpoints) -> None:
    record = {"backend": Backend(tag="resnet:v2", replicas=3), "phase": Phase.RUNNING}
    checkpoints.save({("backend", "resnet:v2"): record})
    assert checkpoints.load("backend") == {"resnet:v2": record}


def test_records_are_loaded_by_kind_in_order_of_name(checkpoints: Checkpoints) -> None:
    checkpoints.save({("backend", "b/1"): 1, ("backend", "a"): 2, ("back", "c"): 3})
    assert [*checkpoints.load("backend").items()] == [("a", 2), ("b/1", 1)]
    assert checkpoints.load("endpoint") == {}


def test_a_save_is_one_change_of_the_store() -> None:
    store = RecordingStore()
    checkpoints = Checkpoints(store)
    checkpoints.save({("goal", "old"): 1})
    store.changes.clear()
    checkpoints.save(
        {("backend", "a"): 1, (CODE, code_digest(b"code")): b"code"}, [("goal", "old")]
    )
    assert store.changes == [({"backend/a", f"code/{code_digest(b'code')}"}, {"goal/old"})]


def save_code(checkpoints: Checkpoints, blob: bytes) -> str:
    digest = code_digest(blob)
    checkpoints.save({(CODE, digest): blob})
    return digest


def test_code_is_stored_by_its_hash(checkpoints: Checkpoints) -> None:
    digest = save_code(checkpoints, b"def f(): ...")
    assert digest == code_digest(b"def f(): ...")
    assert checkpoints.load_code(digest) == b"def f(): ..."
    assert save_code(checkpoints, b"def f(): ...") == digest


def test_code_may_be_deleted_with_its_backend(checkpoints: Checkpoints) -> None:
    digest = save_code(checkpoints, b"code")
    checkpoints.save({("backend", "a"): digest})
    checkpoints.save({}, [("backend", "a"), (CODE, digest)])
    assert checkpoints.load("backend") == {}
    with pytest.raises(CorruptValueError, match=f"code/{digest} is missing"):
        checkpoints.load_code(digest)


def test_code_under_the_wrong_hash_is_refused(store: KVStore, checkpoints: Checkpoints) -> None:
    digest = code_digest(b"code")
    store.apply({f"code/{digest}": b"other code"})
    with pytest.raises(CorruptValueError, match="holds other code"):
        checkpoints.load_code(digest)
    save_code(checkpoints, b"code")
    assert checkpoints.load_code(digest) == b"code"


def test_damaged_code_is_written_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    checkpoints = Checkpoints(store)
    digest = save_code(checkpoints, b"code")
    root = tmp_path / "default"
    damage_value(root, places_in(root)[f"code/{digest}"])
    with pytest.raises(CorruptValueError, match="deploy that code again"):
        checkpoints.load_code(digest)
    save_code(checkpoints, b"code")
    assert checkpoints.load_code(digest) == b"code"
    store.close()


def test_a_damaged_record_keeps_no_other_from_loading_and_is_named_until_it_is_saved_again(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    Checkpoints(store).save({("goal", "1"): 1})
    store.close()
    root = tmp_path / "default"
    damage_value(root, places_in(root)["goal/1"])
    for _ in range(2):
        store = open_store(tmp_path)
        checkpoints = Checkpoints(store)
        checkpoints.save({("goal", "2"): 2})
        assert checkpoints.load("goal") == {"2": 2}
        assert checkpoints.lost.keys() == {("goal", "1")}
        assert "and its copy are damaged" in checkpoints.lost["goal", "1"]
        store.close()
    store = open_store(tmp_path)
    checkpoints = Checkpoints(store)
    checkpoints.load("goal")
    checkpoints.save({("goal", "1"): 1})
    assert not checkpoints.lost
    assert checkpoints.load("goal") == {"1": 1, "2": 2}
    store.close()


def test_what_is_whole_and_no_record_is_named_until_it_is_deleted(store: KVStore) -> None:
    store.apply({"goal/1": VERSION + b"no pickle", "goal/2": b""})
    checkpoints = Checkpoints(store)
    checkpoints.save({("goal", "3"): 3})
    assert checkpoints.load("goal") == {"3": 3}
    assert checkpoints.lost.keys() == {("goal", "1"), ("goal", "2")}
    checkpoints.save({}, [("goal", "1"), ("goal", "2")])
    assert not checkpoints.lost


@pytest.mark.parametrize(
    "record",
    [Decimal(1), Path("a"), ValueError("a"), os.getcwd, pytest.raises],
    ids=["Decimal", "Path", "ValueError", "a builtin", "a function"],
)
def test_a_record_that_could_not_be_loaded_is_not_saved(
    store: KVStore, checkpoints: Checkpoints, record: object
) -> None:
    with pytest.raises(RecordRefusedError, match="record goal/2 holds"):
        checkpoints.save({("goal", "1"): 1, ("goal", "2"): {"deep": [record]}})
    assert store.load() == {}


@pytest.mark.parametrize("record", [lambda: 1, sys, iter(())], ids=["lambda", "module", "iterator"])
def test_a_record_that_cannot_be_pickled_is_not_saved(
    store: KVStore, checkpoints: Checkpoints, record: object
) -> None:
    with pytest.raises(RecordRefusedError, match="goal/1"):
        checkpoints.save({("goal", "1"): record})
    assert store.load() == {}


def calling(module: str, name: str) -> bytes:
    """Return a pickle that would call ``module.name("x")``."""
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x05" + strings + b"\x93\x8c\x01x\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("greenroom.pretended", "os.system"),
        ("greenroom.pretended", "Decimal"),
        ("greenroom.pretended", "os"),
        ("greenroom.persistence.checkpoints", "pickle.loads"),
        ("greenroom.persistence.checkpoints", "code_digest"),
        ("greenroom.pretended", "Missing"),
        ("greenroom.missing", "Backend"),
        ("greenroomx", "Backend"),
    ],
)
def test_a_record_that_would_call_anything_else_is_refused(
    store: KVStore, checkpoints: Checkpoints, module: str, name: str
) -> None:
    store.apply({"goal/1": struct.pack(">I", FORMAT) + calling(module, name)})
    with pytest.raises(RecordRefusedError, match=f"goal/1 holds {module}.{name}"):
        checkpoints.load("goal")
    assert list(store.load()) == ["goal/1"]


@pytest.mark.parametrize("schema", [OLDEST - 1, FORMAT + 2])
def test_a_format_beyond_the_next_is_refused_before_unpickling_naming_both(
    store: KVStore, checkpoints: Checkpoints, schema: int
) -> None:
    value = struct.pack(">I", schema) + b"not even a pickle"
    store.apply({"goal/1": value})
    message = rf"goal/1 has format {schema}; this release reads formats {OLDEST} to {FORMAT + 1}\."
    with pytest.raises(OtherFormatError, match=message):
        checkpoints.load("goal")
    assert store.get("goal/1") == value


@pytest.mark.parametrize(
    "value",
    [b"", VERSION, VERSION + b"not a pickle", VERSION + pickle.dumps([1, 2])[:-3]],
)
def test_bytes_that_are_no_record_are_lost_and_said_so(
    store: KVStore, checkpoints: Checkpoints, value: bytes
) -> None:
    store.apply({"goal/1": value})
    assert checkpoints.load("goal") == {}
    assert "goal/1" in checkpoints.lost["goal", "1"]


@pytest.mark.parametrize("kind", ["", "a/b"])
def test_an_impossible_kind_is_refused(checkpoints: Checkpoints, kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        checkpoints.save({(kind, "1"): 1})
    with pytest.raises(ValueError, match="kind"):
        checkpoints.load(kind)


@pytest.mark.parametrize("error", StoreError.__subclasses__())
def test_errors_survive_the_way_between_processes(error: type[StoreError]) -> None:
    copy = pickle.loads(pickle.dumps(error("what failed")))
    assert type(copy) is error
    assert str(copy) == "what failed"
