"""Checkpoints: pickles of hard state in a key-value store, and code stored once by its hash.

A record is stored under ``kind/name`` as the number of its format and a pickle. The number stands
outside the pickle, for a much later one may name classes that this release lacks. Reading builds
only classes of ours and plain containers, so a record cannot run code of its own; saving makes the
same check, so that nothing is saved which a restarted controller could not load.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections.abc import Iterable, Mapping

from greenroom.core.formats import FORMAT, OLDEST, SHAPES, Reader, reads_records_of
from greenroom.core.records import CODE
from greenroom.persistence.kv import (
    CorruptValueError,
    KVStore,
    OtherFormatError,
    RecordRefusedError,
    StoreError,
)


def is_record(key: str) -> bool:
    """Return whether a key of the store is a record's, and not that of code."""
    return not key.startswith(f"{CODE}/")


_HEADER = struct.Struct(">I")
_OURS = "greenroom."
_PLAIN = {
    "builtins": frozenset(
        {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset"}
        | {"int", "list", "range", "set", "slice", "str", "tuple"}
    ),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "greenroom.core.config": frozenset({"Expanded"}),  # a str with another repr
}


class Checkpoints:
    """Hard state over a KVStore: records by kind and name, code blobs by hash."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._unreadable: dict[str, str] = {}  # keys whose values are whole, and no records

    @property
    def lost(self) -> dict[tuple[str, str], str]:
        """The records and the code that are damaged beyond repair, by kind and name, and how.

        ``("unknown", "changes")`` stands for what is missing without a trace. Deleting or saving
        one again ends it.
        """
        found = {**self._store.lost, **self._unreadable}
        return {_kind_and_name(key): reason for key, reason in sorted(found.items())}

    def load(self, kind: str) -> dict[str, object]:
        """Return every record of ``kind`` by name, sorted, but for those that are ``lost`` then.

        Raises OtherFormatError and RecordRefusedError naming the key; nothing is changed.
        """
        prefix = _key(kind, "")
        records: dict[str, object] = {}
        for key, value in self._store.load(prefix).items():
            try:
                records[key.removeprefix(prefix)] = _decode(key, value)
            except CorruptValueError as error:
                self._unreadable[key] = str(error)
        return records

    def check_formats(self) -> None:
        """Raise OtherFormatError where a release wrote records whose format this cannot read."""
        for key, value in self._store.load().items():
            if is_record(key) and len(value) > _HEADER.size:  # else the controller deals with it
                _check_format(key, value)

    def save(
        self,
        puts: Mapping[tuple[str, str], object],
        deletes: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Save and delete records, ``(kind, name)`` each, or code by its digest: all or nothing.

        Durable on return. Raises RecordRefusedError, before anything is written, for a record that
        could not be loaded again; else what KVStore.apply raises.
        """
        values: dict[str, bytes] = {}
        for (kind, name), record in puts.items():
            key = _key(kind, name)
            values[key] = record if kind == CODE else _encode(key, record)  # type: ignore[assignment]
        deleted = [_key(kind, name) for kind, name in deletes]
        self._store.apply(values, deleted)
        for key in (*values, *deleted):
            self._unreadable.pop(key, None)

    def load_code(self, digest: str) -> bytes:
        """Return the blob with this digest; raises CorruptValueError where it is lost."""
        key = _key(CODE, digest)
        try:
            blob = self._store.get(key)
        except CorruptValueError as error:
            raise CorruptValueError(f"{error}: deploy that code again") from error
        if blob is None or code_digest(blob) != digest:
            raise CorruptValueError(
                f"{key} {'is missing' if blob is None else 'holds other code'}, expected the code "
                "with that sha256; deploy that code again"
            )
        return blob


def code_digest(blob: bytes) -> str:
    """Return the name that a code blob is stored under: its sha256, in hexadecimal."""
    return hashlib.sha256(blob).hexdigest()


def _kind_and_name(key: str) -> tuple[str, str]:
    kind, _, name = key.partition("/")
    return kind, name


def _key(kind: str, name: str) -> str:
    if not kind or "/" in kind:
        raise ValueError(f"kind {kind!r} must be a word without '/', such as 'backend'")
    return f"{kind}/{name}"


def _encode(key: str, record: object) -> bytes:
    try:
        pickled = pickle.dumps(record, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise RecordRefusedError(
            f"the record {key} of {type(record)} cannot be pickled: {error}. Keep only plain "
            "values in it, and code as a code blob"
        ) from error
    value = _HEADER.pack(FORMAT) + pickled
    _decode(key, value)
    return value


def _decode(key: str, value: bytes) -> object:
    if len(value) <= _HEADER.size:
        raise CorruptValueError(f"{key} holds {len(value)} bytes, not a record; save it again")
    _check_format(key, value)
    try:
        return _Unpickler(key, value[_HEADER.size :]).load()
    except StoreError:
        raise
    except Exception as error:  # a pickle may raise whatever its classes raise
        raise CorruptValueError(
            f"{key} cannot be unpickled: {error!r}. Its class changed without a new "
            "format, or its bytes are not a record: save it again, or delete it"
        ) from error


def _check_format(key: str, value: bytes) -> None:
    (found,) = _HEADER.unpack_from(value)
    if not reads_records_of(found):
        raise OtherFormatError(
            f"{key} has format {found}; this release reads formats {OLDEST} to {FORMAT + 1}. Run "
            "the release that wrote it, or use another state dir; nothing was changed"
        )


class _Unpickler(Reader):
    """Builds classes of ours and plain values; refuses everything else by name."""

    def __init__(self, key: str, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self._key = key

    def find_class(self, module: str, name: str) -> type:
        """Return the class, or raise RecordRefusedError."""
        if name in _PLAIN.get(module, ()):
            return self._found(module, name)
        if module.startswith(_OURS):
            found = self._found(module, name)
            if f"{module}.{name}" in SHAPES:
                return found
        raise RecordRefusedError(
            f"the record {self._key} holds {module}.{name}; allowed are plain "
            "containers, datetime, collections, and classes of ours that are marked by "
            "greenroom.core.formats.travels. Convert it to one of those before saving"
        )

    def _found(self, module: str, name: str) -> type:
        try:
            found: type = super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise RecordRefusedError(
                f"the record {self._key} holds {module}.{name}, which this version lacks: {error}. "
                "Run the version that wrote it"
            ) from error
        return found
