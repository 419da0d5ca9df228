"""Who needs which stored code, so that what nobody needs any more can be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol


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
