"""Sticky sessions: which replica a session's queries go to, and the cookie that says so.

Theory of operation. A session's *home* is one replica of the backend. A cookie of ours names it, so
the session stays there until that replica is gone, drains or is on a host that does not answer.
A session by header, by a cookie of the application or by a handle's ``session_id`` names nothing:
its home is the first replica in the order that the hash of key and replica gives (see traffic.py),
which all proxies know without asking each other. It moves when its home is gone, too, and
a replica that is new takes its share, 1 in n, of such sessions. A cookie whose replica is gone is
treated like these, and the replica that answers renews it.

Anyone can write a cookie. It decides on the replica alone, as a header does.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from greenroom.core.config import SessionAffinity
from greenroom.core.routing.tickets import Headers, QueryLike, Session
from greenroom.core.routing.traffic import Split

COOKIE = b"cookie"
MAX_KEY = 1024  # characters of a session's key that count


def session_of(query: QueryLike, affinity: SessionAffinity | None) -> Session | None:
    """Return the session of a query; None where it has none."""
    if query.session_id:
        return Session(query.session_id[:MAX_KEY])
    return None if affinity is None else _session_in(query.headers(), affinity)


def _session_in(headers: Headers, affinity: SessionAffinity) -> Session | None:
    if affinity.header is not None:
        key = _first(headers, affinity.header.lower().encode())
        return Session(key[:MAX_KEY]) if key else None
    for part in _first(headers, COOKIE).split(";"):
        name, _, value = part.strip().partition("=")
        if name == affinity.cookie and value:
            key, dot, replica = value.rpartition(".")
            if not (affinity.set_cookie and dot):
                key, replica = value, ""
            return Session(key[:MAX_KEY], replica)
    return None


def _first(headers: Headers, name: bytes) -> str:
    return next((value for each, value in headers if each == name), b"").decode("latin-1")


def new_cookie(affinity: SessionAffinity, headers: Headers, route: str, tag: str) -> bytes | None:
    """Return the Set-Cookie that makes a replica the home of a request's session.

    None where it is already, or where cookies are the application's.
    """
    if affinity.cookie is None or not affinity.set_cookie:
        return None
    known = _session_in(headers, affinity)
    own = tag.rpartition("#")[2]
    if known is not None and known.replica == own:
        return None
    key = secrets.token_hex(16) if known is None or not _is_ours(known.key) else known.key
    parts = [f"{affinity.cookie}={key}.{own}", f"Path={route}", "HttpOnly"]
    parts.append(f"SameSite={affinity.same_site.capitalize()}")
    if affinity.max_age_s is not None:
        parts.append(f"Max-Age={affinity.max_age_s}")
    if affinity.secure:
        parts.append("Secure")
    return "; ".join(parts).encode()


def _is_ours(key: str) -> bool:
    return len(key) == 32 and all(each in "0123456789abcdef" for each in key)


class Homes:
    """The replicas of one backend that are sessions' homes."""

    __slots__ = ("_split", "_tags")

    def __init__(self) -> None:
        self._tags: tuple[str, ...] = ()
        self._split = Split({})

    def of(self, session: Session, backend: str, tags: Iterable[str]) -> str:
        """Return the home of a session among these replicas; "" where there are none."""
        among = tuple(tags)
        named = f"{backend}#{session.replica}"
        if session.replica and named in among:
            return named
        if among != self._tags:
            self._tags, self._split = among, Split(dict.fromkeys(among, 1.0))
        return self._split.choose(session.key) or ""
