"""Who needs which stored code, so that what nobody needs any more can be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


class CodeUse:
    """Holders and the digests that each holds; the cost of a change follows the holder's own."""

    def __init__(self) -> None:
        self._held: dict[Hashable, frozenset[str]] = {}
        self._holders: Counter[str] = Counter()

    def hold(self, holder: Hashable, digests: Iterable[str]) -> set[str]:
        """Have ``holder`` hold these digests and no others; return those that nobody holds now."""
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
        return freed

    def is_held(self, digest: str) -> bool:
        """Tell whether anybody holds the digest."""
        return digest in self._holders
