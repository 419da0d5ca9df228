"""The key-value store that hard state is kept in: its contract, a store in memory, its errors.

Errors are split by what the code that catches them would do. Each takes one finished sentence, so
that it survives pickling on its way between actors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

MAX_KEY_BYTES = 180
"""Longest key, in bytes of UTF-8: any such key fits in a file name, whatever its characters."""

UNNAMED = "unknown/changes"
"""The key that is lost where changes are of which not even the keys are left."""


class KVStore(Protocol):
    """Bytes by key, changed all or nothing. Use one store from one thread at a time.

    A key is text of 1 to ``MAX_KEY_BYTES`` bytes in UTF-8 without NUL, such as
    ``backend/resnet:v2``; methods raise ValueError for any other key, and StoreClosedError
    after ``close``.
    """

    @property
    def lost(self) -> Mapping[str, str]:
        """The keys whose values are damaged beyond repair, and how; UNNAMED may be among them.

        They are not absent: they stay here until they are put or deleted.
        """
        ...

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None where there is none.

        Blocks for one read. Raises CorruptValueError rather than return a damaged value.
        """
        ...

    def load(self, prefix: str = "") -> dict[str, bytes]:
        """Return the values whose keys start with ``prefix``, in the order of their code points.

        Those that are ``lost`` are left out. Blocks for as long as reading them takes; raises
        StoreNotReadableError.
        """
        ...

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing; durable, kill -9 and power loss included, on return.

        Blocks for a few fsyncs. Deleting an absent key does nothing; a key in both is a ValueError;
        a value that is not bytes is a TypeError. Where a StoreError is raised the whole change may
        or may not have been made: repeating it is safe.
        """
        ...

    def close(self) -> None:
        """Close the store and end the right to write to it; a repeat does nothing."""
        ...


class LeasedStore(KVStore, Protocol):
    """The store of one writer, whose changes are refused once there is a later one."""

    @property
    def epoch(self) -> int:
        """The number of this writer, higher than every earlier one's."""
        ...

    @property
    def store_id(self) -> str:
        """What tells this store from any other, for as long as it exists."""
        ...

    def renew(self, lease: bytes, term_s: float) -> None:
        """Write the lease, which is over in ``term_s`` by the clock of the store, if it has one.

        Raises what ``apply`` does; a store that is not ``renews_apart`` blocks for a fsync.
        """
        ...

    @property
    def renews_apart(self) -> bool:
        """Whether ``renew`` may be called on another thread than all else, and should be."""
        ...


class Claim(NamedTuple):
    """What a store says of its last writer; without one, nothing."""

    epoch: int = 0
    store_id: str = ""
    lease: bytes = b""
    is_over: bool | None = None  # by the store's own clock; None where it has none
    token: str = ""  # that tells two writers of one epoch apart

    def check_as_seen(self, store: object, after: int | None, lease: bytes | None) -> None:
        """Raise StaleWriterError unless this is what the host that takes over has seen.

        ``after`` is the epoch, and ``lease`` the lease, that it has seen; None for any.
        """
        if after not in {None, self.epoch}:
            raise StaleWriterError(
                f"{store} was to be taken over from epoch {after}, and is at {self.epoch}: another "
                "host was quicker"
            )
        if lease not in {None, self.lease}:
            raise StaleWriterError(
                f"{store} was to be taken over, and its lease was renewed since it was looked at: "
                "its writer was only slow"
            )


class StoreLocation(Protocol):
    """Where a store is. Its text says so to people, without a password."""

    def open(self, *, after: int | None = None, lease: bytes | None = None) -> LeasedStore:
        """Become the writer; each earlier one is fenced, and raises StaleWriterError.

        Alone, unless ``after`` is given: StoreLockedError while another writer lives.
        With ``after`` hosts share the store: the writer of that epoch is superseded, though it may
        live; StaleWriterError where there is another one by now, or another ``lease``.
        """
        ...

    def read(self, wanted: Callable[[str], object] = bool) -> KVStore:
        """Return what is saved under ``wanted`` keys, by default all, as a store in memory.

        It is what one moment had, with a writer at work too, and changes nothing. Raises
        StoreMissingError where nothing was ever saved.
        """
        ...

    def namespaces(self) -> list[str]:
        """Return the namespaces that have stores in this place; raises StoreError."""
        ...

    def in_namespace(self, namespace: str) -> StoreLocation:
        """Return where the store of another namespace is, in the same place."""
        ...

    def read_claim(self) -> Claim:
        """Return what the store says of its last writer. Raises StoreError."""
        ...

    def forget(self) -> None:
        """Delete all that is saved; raises StoreError."""
        ...

    def try_to_write(self) -> None:
        """Raise NothingSavedError unless the store could be written; changes nothing."""
        ...


def check_key(key: str, *, what: str = "key") -> None:
    """Raise ValueError, calling ``key`` a ``what``, unless it may name a value."""
    if not key:
        raise ValueError(f"a {what} is empty; expected text such as 'resnet:v2'")
    if "\0" in key:
        raise ValueError(f"{what} {key!r} holds a NUL; remove it")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {key!r} holds a lone surrogate, so it is not text") from error
    if size > MAX_KEY_BYTES:
        raise ValueError(
            f"{what} {key!r} is {size} bytes long in UTF-8; expected at most {MAX_KEY_BYTES}, "
            "so choose a shorter name"
        )


def check_found(store: KVStore, key: str) -> None:
    """Raise CorruptValueError where a key is lost, which is not to be taken for an absent one."""
    if key in store.lost:
        raise CorruptValueError(
            f"key {key!r} is lost: {store.lost[key]}. Nothing of it was used. Save it again"
        )


def checked(
    puts: Mapping[str, bytes], deletes: Iterable[str]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the change that ``apply`` was asked for, or raise ValueError or TypeError."""
    puts, deletes = dict(puts), tuple(dict.fromkeys(deletes))
    for key in (*puts, *deletes):
        check_key(key)
    for key, value in puts.items():
        if not isinstance(value, bytes):
            raise TypeError(f"the value of key {key!r} is {type(value).__name__}; expected bytes")
    if twice := puts.keys() & set(deletes):
        raise ValueError(f"keys {sorted(twice)} are both put and deleted in one change; choose one")
    return puts, deletes


class MemoryStore:
    """A KVStore that lasts as long as this object; "durable" means until then."""

    def __init__(
        self, values: Mapping[str, bytes] | None = None, lost: Mapping[str, str] | None = None
    ) -> None:
        self._values = dict(values or {})
        self._closed = False
        self.lost = lost or {}  # where it was read

    def get(self, key: str) -> bytes | None:
        """Return the value last applied, or None; see KVStore."""
        check_key(key)
        self._check_open()
        check_found(self, key)
        return self._values.get(key)

    def load(self, prefix: str = "") -> dict[str, bytes]:
        """Return the values whose keys start with ``prefix``, sorted; see KVStore."""
        self._check_open()
        return {key: self._values[key] for key in sorted(self._values) if key.startswith(prefix)}

    def apply(self, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
        """Put and delete all or nothing; see KVStore."""
        puts, deletes = checked(puts, deletes)
        self._check_open()
        self._values.update(puts)
        for key in deletes:
            self._values.pop(key, None)

    def close(self) -> None:
        """Refuse every later call."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this in-memory store was closed; make a new one")


class StoreError(Exception):
    """Root of every error that a store or a checkpoint raises on purpose."""


class CorruptValueError(StoreError):
    """Bytes on disk are not what was written: restore them, or save the key again."""


class OtherFormatError(StoreError):
    """Another version wrote this, which this one cannot read: run that one; nothing was changed."""


class StoreLockedError(StoreError):
    """Another live writer holds the store: stop it, wait for it, or open read-only."""


class StaleWriterError(StoreError):
    """A later writer has taken the store over: this process must stop writing for good."""


class StoreNotWritableError(StoreError):
    """The store cannot be changed from here: fix the folder, the disk or the opening."""


class NothingSavedError(StoreNotWritableError):
    """The system refused before anything was changed: the store is as it was."""


class StoreNotReadableError(StoreError):
    """The system refuses to read the store: fix the folder or the disk."""


class StoreMissingError(StoreNotReadableError):
    """There is no store there yet: nothing was ever saved, or the path is wrong."""


class OtherStoreError(StoreError):
    """Another store, or an older copy, is in the place of the one that was used: bring it back."""


class StoreClosedError(StoreError):
    """The store was closed, or this process inherited it through a fork: open it again."""


class RecordRefusedError(StoreError):
    """A record cannot be a checkpoint: it cannot be pickled, or holds a class not allowed."""
