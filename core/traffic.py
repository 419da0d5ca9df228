"""Which backend of an endpoint a query goes to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping


def choose_backend(
    traffic: Mapping[str, float], shard_key: str | None, draw: Callable[[], float]
) -> str | None:
    """Pick a backend by its weight; None when none has any.

    Without a shard key by ``draw()``, a uniform number in [0, 1). With one by the first 8 bytes of
    its SHA-256 as such a number, over the backends in the order of their names: the same on every
    proxy and after every restart.
    """
    if len(traffic) == 1:
        return next(iter(traffic))
    if shard_key is None:
        point = draw()
    else:
        digest = hashlib.sha256(shard_key.encode("utf-8", "surrogatepass")).digest()
        point = int.from_bytes(digest[:8], "big") / 2**64
    chosen = None
    for backend, weight in sorted(traffic.items()):
        if weight <= 0:
            continue
        chosen = backend
        point -= weight
        if point < 0:
            break
    return chosen
