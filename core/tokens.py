"""Tokens of the HTTP API: who may ask for what.

A token is 256 random bits, which only its holder knows: the cluster keeps the sha256. It has a
name, which the history shows as the author of what was changed with it; a role; and mostly an end.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal, get_args

from greenroom.core.records import TokenRecord

Role = Literal["viewer", "deployer", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)  # each may do what those before it may
TOKEN = "token"  # the kind of the records
MAX_TOKENS = 1_000
PREFIX = "greenroom_"  # by which scanners for secrets find one


def digest_of(token: str) -> str:
    """Return the hash of a token that is kept. It needs no salt: a token cannot be guessed."""
    return hashlib.sha256(token.encode()).hexdigest()


def may(role: str, wanted: Role | None) -> bool:
    """Return whether a role includes another one."""
    return wanted is not None and ROLES.index(role) >= ROLES.index(wanted)


def holder(tokens: Iterable[TokenRecord], token: str, wall_now: float) -> TokenRecord | None:
    """Return the record of a token that has not expired, after a check of every one."""
    digest, found = digest_of(token), None
    for record in tokens:
        if hmac.compare_digest(record.digest, digest):
            found = record
    is_over = found is None or (found.expires_at is not None and found.expires_at <= wall_now)
    return None if is_over else found
