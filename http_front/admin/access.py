"""Who may ask the controller for what over HTTP, and asking it in their name.

Theory of operation. Every request bears its token in the Authorization header, which browsers never
add by themselves, so no page of another site can act in an operator's name. Besides, requests that
such a page makes are refused, and so are names that a page could have given this address (DNS
rebinding).

The tokens' hashes are the controller's. A worker keeps a copy for REVOKED_WITHIN_S.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from greenroom.actors.messages.admin import request_of
from greenroom.actors.runtime.asking import new_id
from greenroom.core.errors import ForbiddenError, UnauthorizedError
from greenroom.core.operations import ListTokens, Operation, WaitForGoal
from greenroom.core.records import TokenRecord
from greenroom.core.tokens import Role, holder, may
from greenroom.http_front.link import Kept, Link

REVOKED_WITHIN_S = 2.0
CREATED_WITHIN_S = 0.2  # a token that is not known is looked for this often at most
TIMEOUT_S = 5.0
ANSWER_S = 30.0  # how long an operation may take that does not wait for a goal
MAX_TOKEN_BYTES = 200
_BY_PROXIES = frozenset({b"forwarded", b"via", b"x-real-ip"})

Head = Mapping[bytes, bytes]


class Controller:
    """Knows the tokens, as of lately, and asks in the name of a holder; one in each worker."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tokens = Kept(self._list)

    async def holder(self, head: Head, role: Role | None) -> TokenRecord:
        """Return the token that a request bears.

        UnauthorizedError where that is none or not in force, ForbiddenError where its role does not
        include ``role``, NotRunningError where there is no controller to ask.
        """
        token = _bearer(head)
        tokens = await self._tokens.get(REVOKED_WITHIN_S, strictly=True)
        found = holder(tokens, token, time.time())
        if found is None:
            tokens = await self._tokens.get(CREATED_WITHIN_S, strictly=True)
            found = holder(tokens, token, time.time())
        if found is None:
            raise UnauthorizedError(
                "the token is unknown, expired or revoked; `greenroom token list` has those in "
                "force"
            )
        if not may(found.role, role):
            raise ForbiddenError(
                f"token {found.name!r} has the role {found.role}; this takes "
                + (f"the role {role}" if role else "the command greenroom")
            )
        return found

    async def _list(self) -> Sequence[TokenRecord]:
        listed = await self._link.request(request_of(ListTokens(), new_id()), TIMEOUT_S)
        return [TokenRecord(**each) for each in listed]

    async def request(
        self,
        operation: Operation,
        author: str,
        *,
        request_id: str = "",
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Return the operation's answer, or raise its error."""
        request = request_of(operation, request_id or new_id(), f"token {author}")
        return await self._link.request(request, timeout_s)

    async def reached(self, goals: list[str], author: str, within_s: float) -> bool:
        """Return whether all goals are reached; raise why one has failed."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + within_s
        for goal in goals:
            left_s = max(0.0, ends_at - loop.time())
            try:
                await self.request(WaitForGoal(goal_id=goal), author, timeout_s=left_s)
            except TimeoutError:
                return False
        return True


def _bearer(head: Head) -> str:
    scheme, _, token = head.get(b"authorization", b"").partition(b" ")
    token = token.strip()
    if scheme.lower() != b"bearer" or not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise UnauthorizedError(
            "a token is needed, as the header `Authorization: Bearer ...`; make one with "
            "`greenroom token create`"
        )
    return token.decode("latin-1")


# --- Pages of other sites -------------------------------------------------------------------------


def check_name(head: Head, own_names: Sequence[str], *, is_local: bool) -> None:
    """Raise ForbiddenError for a Host that another site's page may have made lead here.

    ``is_local``: whether only this host can connect. Then it must be an address, localhost or one
    of ``own_names``. From elsewhere that is a matter of the operator's DNS.
    """
    host = _host(head)
    name = _name(host)
    if is_local and not (_is_address(name) or name in {"localhost", *own_names}):
        raise ForbiddenError(
            f"the Host header {host[:100]!r} is no name of this host; call it localhost, or by "
            "its address"
        )


def check_origin(head: Head) -> None:
    """Raise ForbiddenError for what a browser sends for a page that is not ours."""
    site = head.get(b"sec-fetch-site")
    if site is not None:
        is_own = site in {b"same-origin", b"none"}
    else:
        origin = head.get(b"origin")
        is_own = origin is None or urlsplit(origin.decode("latin-1")).netloc.lower() == _host(head)
    if not is_own:
        raise ForbiddenError("a page of another site may not use the admin API")


def check_not_forwarded(head: Head) -> None:
    """Raise ForbiddenError for a request that a proxy has passed on.

    Who shows the applications to others by a reverse proxy has not asked for these to be shown.
    """
    for name in head:
        if name in _BY_PROXIES or name.startswith(b"x-forwarded-"):
            raise ForbiddenError(
                f"the header {name.decode('latin-1')[:100]!r} says that a proxy passed this on; "
                "the dashboard and the admin API are shown by one only from a place of their own "
                "(--http-pages-port)"
            )


def _host(head: Head) -> str:
    return head.get(b"host", b"").decode("latin-1").lower()


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
