"""Releases of a backend, and the rolling update from one to the next.

Theory of operation. A backend's record has a list of releases, the newest last. New code or new
actor options make a new release; settings alone are changed in place. An earlier release stays
until its last replica is gone and the newest release has come up in full. The update is rolling:
replicas of the new release start first, a few above the wanted number, and old ones stop as new
ones run, so that there are never fewer than before. A new release that cannot start is rolled back:
the last one that came up in full becomes the newest again, and keeps its remaining replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from greenroom.core.config import RuntimeEnv
from greenroom.core.lifecycle.replicas import Replica
from greenroom.core.records import CODE, BackendDefinition, BackendRecord, Definition, Key, Release


def digests_of(*held: Release | Definition | None) -> set[str]:
    """Return the names of what is stored for these: their code, and their folders."""
    digests: set[str] = set()
    for each in held:
        if isinstance(each, Release | BackendDefinition):
            digests |= {each.code_digest, *folders_of(each)}
    return digests


def folders_of(release: Release | BackendDefinition) -> set[str]:
    """Return the names of the folders that a release's replicas have a copy of."""
    return set(RuntimeEnv.read(release.actor_options.get("runtime_env", {})).folders)


class CodeUse:
    """Which stored code is needed by which backend or history, so that the rest can be deleted."""

    def __init__(self, lost: set[Key]) -> None:
        """Take the keys of what is lost: another deploy may bring it again."""
        self._lost = lost
        self._held: dict[Hashable, frozenset[str]] = {}
        self._holders: Counter[str] = Counter()
        self._freed: set[str] = set()

    def hold(self, holder: Hashable, digests: Iterable[str]) -> None:
        """Set the digests that ``holder`` needs; the cost follows their number alone."""
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
        """Return what no holder needs any more, at the end of a step.

        One holder may let go of what another takes up later in the same step.
        """
        freed, self._freed = self._freed, set()
        return freed - self._holders.keys()

    def is_stored(self, digest: str) -> bool:
        """Return whether a holder needs the digest and it is not lost."""
        return self.is_needed(digest) and (CODE, digest) not in self._lost

    def is_needed(self, digest: str) -> bool:
        """Return whether a holder needs the digest."""
        return digest in self._holders


def numbered(record: BackendRecord, number: int) -> Release:
    """Return the release of that number, the newest where there is no such release any more."""
    return next((r for r in record.releases if r.number == number), record.newest)


def is_newest(record: BackendRecord, replica: Replica) -> bool:
    """Return whether a replica runs the newest release."""
    return replica.release == record.newest.number


def fallback(record: BackendRecord) -> Release | None:
    """Return the release to go back to while the newest has not come up in full."""
    if record.newest.ran:
        return None
    return next((release for release in reversed(record.releases) if release.ran), None)


def may_fail(record: BackendRecord) -> bool:
    """Return whether there is a release to go back to, or none of whose replicas has ever run."""
    if record.failure or record.newest.ran:
        return False
    return not record.newest.served or fallback(record) is not None


def with_newest(record: BackendRecord, **changes: Any) -> BackendRecord:
    """Return the record with changed fields of its newest release."""
    return replace(record, releases=(*record.releases[:-1], replace(record.newest, **changes)))


def updated(record: BackendRecord, changes: Mapping[str, Any], wanted: int) -> BackendRecord:
    """Return the record with a new release made of ``changes``; ``wanted`` replicas ran before.

    Going back to a release whose replicas are left takes that one up again.
    """
    config_id = max(release.config_id for release in record.releases) + 1
    release = next((r for r in record.releases[:-1] if is_made_of(r, changes)), None)
    if release is None:
        number = max(release.number for release in record.releases) + 1
        release = Release(number=number, config_id=config_id, **changes)
    elif release.config != changes["config"]:
        release = replace(release, config=changes["config"], config_id=config_id)
    has_run = record.newest.ran or fallback(record) is None
    return replace(
        _with_last(record, release),
        capacity=wanted if has_run else record.capacity,
        update_failure="",
    )


def rolled_back(record: BackendRecord, to: Release, error: str) -> BackendRecord:
    """Return the record with an earlier release as its newest again, because of ``error``."""
    return replace(_with_last(record, to), update_failure=error)


def as_never_run(record: BackendRecord) -> BackendRecord:
    """Return the record as if none of its releases had ever run."""
    releases = tuple(replace(release, ran=False, served=False) for release in record.releases)
    return replace(record, was_running=False, releases=releases)


def pruned(record: BackendRecord) -> BackendRecord:
    """Return the record without the releases that nothing needs any more."""
    needed = {replica.release for replica in record.replicas.values()} | {record.newest.number}
    if (kept := fallback(record)) is not None:
        needed.add(kept.number)
    releases = tuple(release for release in record.releases if release.number in needed)
    return record if releases == record.releases else replace(record, releases=releases)


def is_made_of(release: Release, changes: Mapping[str, Any]) -> bool:
    """Return whether a release is made of this code and these options."""
    made_of = (release.code_hash, release.actor_options)
    return made_of == (changes["code_hash"], changes["actor_options"])


def _with_last(record: BackendRecord, release: Release) -> BackendRecord:
    others = (other for other in record.releases if other.number != release.number)
    return replace(record, fallback_config=None, releases=(*others, release))
