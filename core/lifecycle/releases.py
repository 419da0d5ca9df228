"""Releases of a backend: what it is to run now, what it ran before, and the way from one on.

Theory of operation. A backend's record holds its newest release in its own fields, and those before
as ``earlier``, as long as replicas of them are left or the newest has not come up in full. New code
or new actor options are a new release; settings alone are changed in place. The update is rolling:
replicas of the new release start first, a few above what is wanted, and old ones go as new ones
run, so that never fewer run than before. A new release that cannot start is rolled back: the last
one that came up in full is the newest again, and its replicas, which are still there, stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from greenroom.core.records import BackendRecord, Release

# Who needs which stored code, so that what nobody needs any more can be deleted.


class Coded(Protocol):
    """A release of a backend, or a definition of one."""

    @property
    def code_digest(self) -> str:
        """The name of its code."""

    @property
    def actor_options(self) -> Mapping[str, Any]:
        """Fields of ActorOptions."""


NOTHING: Mapping[str, bytes] = MappingProxyType({})


def digests_of(release: Coded) -> set[str]:
    """Return the names of what is stored for a release: its code, and the folder it works in."""
    return {release.code_digest, *folders_of(release)}


def folders_of(release: Coded) -> set[str]:
    """Return the name of the folder that a release works in, if it has one."""
    folder = release.actor_options.get("working_dir")
    return {folder} if folder else set()


class CodeUse:
    """Holders and the digests that each holds; the cost of a change follows the holder's own."""

    def __init__(self) -> None:
        self._held: dict[Hashable, frozenset[str]] = {}
        self._holders: Counter[str] = Counter()
        self._freed: set[str] = set()
        self.lost: set[str] = set()  # held, and yet not there; another deploy may bring it again

    def hold(self, holder: Hashable, digests: Iterable[str]) -> None:
        """Have ``holder`` hold these digests and no others."""
        before, now = self._held.get(holder, frozenset()), frozenset(digests)
        self._holders.update(now - before)
        self._holders.subtract(before - now)
        if now:
            self._held[holder] = now
        else:
            self._held.pop(holder, None)
        freed = {digest for digest in before - now if not self._holders[digest]}
        for digest in freed:
            del self._holders[digest]
        self._freed |= freed

    def take_freed(self) -> set[str]:
        """Return what somebody held and nobody does now, as the step is over.

        One holder may let go of what another takes up later in the same step.
        """
        freed, self._freed = self._freed, set()
        return freed - self._holders.keys()

    def is_stored(self, digest: str) -> bool:
        """Tell whether anybody holds the digest, and it is not lost."""
        return digest in self._holders and digest not in self.lost


ROLLING_UPDATE_PERCENTAGE = 0.2  # of the replicas, at least one, are started beyond the old ones

_FIELDS = (
    "code_hash",
    "code_digest",
    "config",
    "config_id",
    "actor_options",
    "version",
    "ran",
)


def newest(record: BackendRecord) -> Release:
    """Return the release that the record is to run."""
    return Release(number=record.release, **{field: getattr(record, field) for field in _FIELDS})


def release_of(record: BackendRecord, replica: str) -> Release:
    """Return the release that a recorded replica runs."""
    return numbered(record, record.outdated.get(replica, record.release))


def numbered(record: BackendRecord, number: int) -> Release:
    """Return the release of that number, the newest where there is no such any more."""
    return next((r for r in record.earlier if r.number == number), newest(record))


def fallback(record: BackendRecord) -> Release | None:
    """Return the release to go back to while the newest has not come up in full."""
    if record.ran:
        return None
    return next((release for release in reversed(record.earlier) if release.ran), None)


def digests(record: BackendRecord) -> set[str]:
    """Return the names of all code that the record may have to start."""
    return digests_of(record).union(*(digests_of(release) for release in record.earlier))


def updated(record: BackendRecord, changes: Mapping[str, Any], wanted: int) -> BackendRecord:
    """Return the record with a new release made of ``changes``; ``wanted`` replicas ran before.

    Going back to a release whose replicas are left takes that one up again.
    """
    known = next((r for r in record.earlier if _is_made_of(r, changes)), None)
    others = tuple(release for release in record.earlier if release is not known)
    left = newest(record)
    if left.ran or left.number in release_numbers(record).values():
        others += (left,)
    ids = [release.config_id for release in (*record.earlier, left)]
    if known is None:
        numbers = [release.number for release in (*record.earlier, left)]
        known = Release(number=max(numbers) + 1, config_id=max(ids) + 1, **changes)
    elif known.config != changes["config"]:
        known = replace(known, config=changes["config"], config_id=max(ids) + 1)
    has_run = record.ran or fallback(record) is None
    return _with(
        record, known, others, capacity=wanted if has_run else record.capacity, update_failure=""
    )


def rolled_back(record: BackendRecord, to: Release, error: str) -> BackendRecord:
    """Return the record with an earlier release as its newest again, because of ``error``."""
    others = (*(release for release in record.earlier if release is not to), newest(record))
    return pruned(_with(record, to, others, update_failure=error))


def as_never_run(record: BackendRecord) -> BackendRecord:
    """Return the record as if none of its releases had ever come up in full."""
    earlier = tuple(replace(release, ran=False) for release in record.earlier)
    return replace(record, ran=False, served=False, was_running=False, earlier=earlier)


def pruned(record: BackendRecord) -> BackendRecord:
    """Return the record without the releases that nothing needs any more."""
    needed = set(record.outdated.values())
    if (kept := fallback(record)) is not None:
        needed.add(kept.number)
    earlier = tuple(release for release in record.earlier if release.number in needed)
    return record if earlier == record.earlier else replace(record, earlier=earlier)


def release_numbers(record: BackendRecord) -> dict[str, int]:
    """Return the number of the release that each recorded replica runs."""
    return {tag: record.outdated.get(tag, record.release) for tag in record.replicas}


def is_release(record: BackendRecord, changes: Mapping[str, Any]) -> bool:
    """Tell whether the newest release is made of this code and these options."""
    return _is_made_of(newest(record), changes)


def _is_made_of(release: Release, changes: Mapping[str, Any]) -> bool:
    made_of = (release.code_hash, release.actor_options)
    return made_of == (changes["code_hash"], changes["actor_options"])


def _with(
    record: BackendRecord, release: Release, earlier: Iterable[Release], **changes: Any
) -> BackendRecord:
    outdated = {t: n for t, n in release_numbers(record).items() if n != release.number}
    return replace(
        record,
        fallback_config=None,
        served=release.ran,
        release=release.number,
        earlier=tuple(earlier),
        outdated=outdated,
        **{field: getattr(release, field) for field in _FIELDS},
        **changes,
    )


class Counts(NamedTuple):
    """The replicas of a backend in an update."""

    wanted: int  # of the new release
    capacity: int  # how many are to run at any time until it is up
    live: int  # of the new release: there, and not about to go
    running: int  # of these
    old_live: int
    old_running: int
    leaving: int  # told to go, or about to be
    can_start_old: bool


class Steps(NamedTuple):
    """What to do next in an update."""

    start: int = 0
    start_old: int = 0  # in place of old ones that died
    retire_old: int = 0


def next_steps(counts: Counts) -> Steps:
    """Return the next steps of an update.

    At most :func:`surge` replicas more than wanted, or than were, have a process at any time,
    those that drain among them.
    """
    c = counts
    if c.running >= c.wanted:
        return Steps(retire_old=c.old_live)
    keep = max(c.capacity - c.running, 0)
    if not c.can_start_old:  # what has never come up in full is not waited for
        keep = min(keep, c.old_running)
    room = max(c.wanted, c.capacity) + surge(c.wanted) - c.live - c.old_live - c.leaving
    start_old = max(min(keep - c.old_live, room), 0) if c.can_start_old else 0
    return Steps(
        start=max(min(c.wanted - c.live, room - start_old), 0),
        start_old=start_old,
        retire_old=max(c.old_live - keep, 0),
    )


def surge(wanted: int) -> int:
    """Return how many replicas an update may have beyond what is wanted."""
    return max(math.ceil(wanted * ROLLING_UPDATE_PERCENTAGE), 1)
