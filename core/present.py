"""Which backends a request may name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from greenroom.core.backends import Backend


class Present(Collection[str]):
    """The backends among these that are not being deleted; to ask for one takes no look at all."""

    def __init__(self, backends: Mapping[str, Backend], tags: Collection[str]) -> None:
        self._backends = backends
        self._tags = tags

    def __contains__(self, tag: object) -> bool:
        return tag in self._tags and not self._backends[str(tag)].record.deleting

    def __iter__(self) -> Iterator[str]:
        return (tag for tag in self._tags if not self._backends[tag].record.deleting)

    def __len__(self) -> int:
        return sum(1 for _ in self)
