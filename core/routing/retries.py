"""Which queries may be sent again after their replica has died, and how many of them.

Whether a query may be retried depends on the first of these that says so: its handle, its endpoint,
its deployment, its HTTP method. Sending a query again that has not run, because it was never sent
or its replica had no room, is not a retry, and none of this applies to it.

How many may be retried is up to a budget. Retries hit a backend when it is at its weakest; where
every query kills its replica, three attempts each would triple the load on the replicas that come
up again. So each query that is run pays a token in, and a retry takes one out. That is the token
bucket of Finagle's RetryBudget (https://twitter.github.io/finagle/guide/Clients.html#retries), with
its percentCanRetry at one: retries never more than double the load. A replica may die with all its
queries under way, of which clients shall notice nothing; a smaller share would not be enough for
that. Finagle's tokens expire. Ours do not, but there are never more than a backend has slots, and
SPARE: enough to retry everything that is under way once, and no hoard for a storm. What is moved
from a host that does not answer takes SPARE on credit first: that may happen before many queries
were run, and is not their doing. The debt is paid off last, as what dies without a token fails, and
what is not moved waits.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_ATTEMPTS = 3  # a query that kills its replica must not kill all of them in turn
# For answers of the last moment before a death. Callers confirm answers by the dozen, so it is not
# known whether these have arrived, and they are retried too.
SPARE = 128
RETRYABLE_METHODS = frozenset(
    {"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"}
)  # RFC 9110, 9.2.2


def may_retry(http_method: str, said: Iterable[bool | None]) -> bool:
    """Return whether a query may be run again; in ``said`` the nearest word comes first."""
    for each in said:
        if each is not None:
            return each
    return http_method in RETRYABLE_METHODS


class RetryBudget:
    """Tokens that queries pay in and retries take out."""

    __slots__ = ("owed", "tokens")

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens
        self.owed = 0

    def pay_in(self, most: int, queries: int = 1) -> None:
        """Count queries; there are never more tokens than ``most`` and SPARE."""
        if self.tokens < most + SPARE:
            self.tokens = min(self.tokens + queries, most + SPARE)
        elif self.owed:
            self.owed = max(self.owed - queries, 0)

    def take_out(self, credit: int = 0) -> bool:
        """Count a retry, on ``credit`` while less is owed, else by a token; False without one."""
        if self.owed < credit:
            self.owed += 1
        elif self.tokens:
            self.tokens -= 1
        else:
            return False
        return True
