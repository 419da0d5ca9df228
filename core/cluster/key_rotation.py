"""How a cluster comes to another key while all its hosts go on talking.

    the key alone --begin--> a next one beside it --all hold both--> the next one is the key,
    and the last one beside it --all hold both--> the key alone

Every host holds what the leader's host holds, or what that held a step ago. A host proves that it
holds its *current* key, and takes who holds any of its keys; the leader takes a step only when all
hosts have told that they are where it is. So what any host proves, every other one takes:

    leader      current K, next N     current N, last K     current N
    others      K,   or K + N         K + N, or N + K       N + K, or N

A host that is lost is not waited for. One that comes back while its key is still taken is brought
along; later its key is no key any more. The leader's host has all of this on disk, as files: so a
controller that dies at any point is followed by one that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class KeyIds(NamedTuple):
    """Which keys a host holds, by name; "" for none."""

    current: str
    next: str = ""
    last: str = ""


def next_step(own: KeyIds, others: Iterable[KeyIds]) -> KeyIds:
    """Return what the leader's host is to hold, after what it holds, given what the others do.

    That is ``own`` while another one is not there yet, and when there is nothing left to do.
    """
    if any(held != own for held in others):
        return own
    if own.next:
        return KeyIds(own.next, last=own.current)
    return KeyIds(own.current)
