"""Who may ask the controller for what over HTTP, and asking it in their name.

Theory of operation. Every request bears its token in the Authorization header, which browsers never
add by themselves, so no page of another site can act in an operator's name. Besides, requests that
such a page makes are refused, and so are names that a page could have given this address (DNS
rebinding).

The tokens' hashes are the controller's. A worker keeps a copy for REVOKED_WITHIN_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.config import is_loopback
from greenroom.core.errors import ForbiddenError, UnauthorizedError
from greenroom.core.operations import ListTokens, Operation, WaitForGoal
from greenroom.core.records import TokenRecord
from greenroom.core.tokens import Role, holder, may
from greenroom.http_front.clients import address_of
from greenroom.http_front.link import Kept, Link
from greenroom.http_front.request import Request

REVOKED_WITHIN_S = 2.0
CREATED_WITHIN_S = 0.2  # a token that is not known is looked for this often at most
TIMEOUT_S = 5.0
ANSWER_S = 30.0  # how long an operation may take that does not wait for a goal
MAX_TOKEN_BYTES = 200
DASHBOARD = "/-/dashboard"
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
        return [TokenRecord(**each) for each in await self._link.request(ListTokens(), TIMEOUT_S)]

    async def request(
        self,
        operation: Operation,
        author: str,
        *,
        request_id: str = "",
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Return the operation's answer, or raise its error."""
        return await self._link.request(operation, timeout_s, f"token {author}", request_id)

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


def check_source(settings: HostSettings, request: Request) -> None:
    """Raise ForbiddenError for what a page of another site, or a proxy, may have sent.

    Pages of other sites may link to the dashboard.
    """
    http, head = settings.http, request.head.named
    own_host, _ = http.pages_address or (http.host, http.port)
    is_local = is_loopback(own_host)
    # Tokens would be readable on their way, and whoever reads one has its role.
    if not is_local and http.ssl_certfile is None:
        raise ForbiddenError(
            "other hosts reach this address, so the dashboard and the admin API are here only by "
            "HTTPS: give --http-ssl-certfile and --http-ssl-keyfile, or a --http-pages-host that "
            "only this host reaches"
        )
    for name in () if http.pages_address is not None else head:
        # Who shows the applications to others by a proxy has not asked for these to be shown.
        if name in _BY_PROXIES or name.startswith(b"x-forwarded-"):
            raise ForbiddenError(
                f"the header {name.decode('latin-1')[:100]!r} says that a proxy passed this on; "
                "the dashboard and the admin API are shown by one only from a place of their own "
                "(--http-pages-port)"
            )
    host = head.get(b"host", b"").decode("latin-1").lower()
    called = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    # Another site's page may have made its name lead here; from elsewhere that is a matter of DNS.
    own_names = {"localhost", settings.host_name.lower(), own_host.lower()}
    if is_local and called not in own_names and address_of(called) is None:
        raise ForbiddenError(
            f"the Host header {host[:100]!r} is no name of this host; call it localhost, or by "
            "its address"
        )
    site, origin = head.get(b"sec-fetch-site"), head.get(b"origin")
    is_own = site in {b"same-origin", b"none"}
    if site is None:
        own_origins = {f"http://{host}", f"https://{host}"}
        is_own = origin is None or origin.decode("latin-1").lower() in own_origins
    if not is_own and request.head.page != DASHBOARD:
        raise ForbiddenError("a page of another site may not use the admin API")
