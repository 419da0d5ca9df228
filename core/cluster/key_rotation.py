"""How a cluster changes its key while all its hosts keep talking.

    the key alone --begin--> a next one beside it --all hold both--> the next one is the key,
    and the last one beside it --all hold both--> the key alone

Every host holds the same keys as the leader's host now, or as it held one step earlier. A host
proves that it holds its *current* key, and accepts peers that prove any of its keys. The leader
takes a step only when all hosts have reported that they hold its keys. So every host accepts the
key that any other host proves:

    leader      current K, next N     current N, last K     current N
    others      K,   or K + N         K + N, or N + K       N + K, or N

The leader does not wait for a lost host. If that host comes back while its key is still accepted,
it gets the keys it lacks; later, its key is no longer accepted. The leader's host keeps all of this
in files, so when a controller dies at any point, the next one continues.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from greenroom.core.formats import travels


@travels
class KeyIds(NamedTuple):
    """The names of the keys that a host holds; "" for none."""

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
