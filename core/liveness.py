"""Which hosts are there, judged by their beats alone: a host is lost quickly and is back slowly.

A host beats some times a second. It is *lost* when nothing has been heard for :data:`LOST_AFTER_S`,
which at 30% loss of packets happens to one that is there once in days; and *back* when it has been
heard for :data:`STEADY_S` without a gap of :data:`GAP_S`. So a link that comes and goes leaves it
lost, and does not have replicas start and stop with every beat.

Who judges may have been stopped itself, or busy: what it has not listened to counts for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

BEAT_S = 0.2
LOST_AFTER_S = 2.4
STEADY_S, GAP_S = 1.0, 0.8
LOOK_S = 0.2  # how often to judge
PAUSE_S = 1.5  # between two looks: the judge itself was away, and not only late


@dataclass(slots=True)
class _Heard:
    at: float
    since: float  # the beginning of the present run of beats
    is_lost: bool = False


class Liveness:
    """All hosts that beat. ``now`` is always monotonic seconds."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Heard] = {}
        self._looked_at = 0.0

    def expect(self, host: str, now: float, patience_s: float = LOST_AFTER_S) -> None:
        """Judge a host, which is lost when it is not heard of for ``patience_s`` from now on.

        Harmless when it is judged already.
        """
        self._hosts.setdefault(host, _Heard(now + patience_s - LOST_AFTER_S, now))

    def forget(self, host: str) -> None:
        """Judge a host no more."""
        self._hosts.pop(host, None)

    def heard(self, host: str, now: float) -> None:
        """Take a host's beat; one of a host that is not judged means nothing."""
        heard = self._hosts.get(host)
        if heard is not None:
            if now - heard.at > GAP_S:
                heard.since = now
            heard.at = now

    def look(self, now: float) -> tuple[list[str], list[str]]:
        """Return the hosts that are lost, and those that are back, since the last look."""
        away_s = now - self._looked_at
        if away_s > PAUSE_S:
            for heard in self._hosts.values():
                heard.at = max(heard.at, min(heard.at + away_s, now))
        self._looked_at = now
        lost, back = [], []
        for host, heard in self._hosts.items():
            if not heard.is_lost and now - heard.at > LOST_AFTER_S:
                heard.is_lost = True
                lost.append(host)
            elif heard.is_lost and _is_steady(heard, now):
                heard.is_lost = False
                back.append(host)
        return lost, back

    def give_up(self, host: str) -> bool:
        """Count a host as lost at once; False when it is already, or is not judged."""
        heard = self._hosts.get(host)
        if heard is None or heard.is_lost:
            return False
        heard.is_lost = True
        heard.at = heard.since = float("-inf")
        return True


def _is_steady(heard: _Heard, now: float) -> bool:
    return now - heard.at <= GAP_S and heard.at - heard.since >= STEADY_S
