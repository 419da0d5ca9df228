"""Tokens of the HTTP API: who may ask for what.

A token is 256 random bits, which only its holder knows: the cluster keeps the sha256. It has a
name, which the history shows as the author of what was changed with it; a role; and mostly an end.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from greenroom.core.errors import ConflictError
from greenroom.core.records import Changes, TokenRecord
from greenroom.core.validation import unknown_name

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
    """Return the record of a token that has not expired, after a look at every one."""
    digest, found = digest_of(token), None
    for record in tokens:
        if hmac.compare_digest(record.digest, digest):
            found = record
    is_over = found is None or (found.expires_at is not None and found.expires_at <= wall_now)
    return None if is_over else found


class Tokens:
    """The tokens of a cluster."""

    def __init__(self, records: Mapping[str, TokenRecord], changes: Changes) -> None:
        self._records = dict(records)
        self._changes = changes

    def __iter__(self) -> Any:
        return iter(self._records.values())

    def create(self, record: TokenRecord) -> None:
        """Add a token; the same again changes nothing."""
        present = self._records.get(record.name)
        if present is not None and present.digest == record.digest:
            return
        if present is not None:
            raise ConflictError(
                f"there is a token named {record.name!r} already; revoke it, or take another name"
            )
        if len(self._records) >= MAX_TOKENS:
            raise ConflictError(f"there are {MAX_TOKENS} tokens already; revoke those of no use")
        self._records[record.name] = record
        self._changes.put(TOKEN, record.name, record)

    def revoke(self, name: str) -> None:
        """Forget a token."""
        if self._records.pop(name, None) is None:
            raise unknown_name("token", name, self._records)
        self._changes.delete(TOKEN, name)
