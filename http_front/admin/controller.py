"""Asks the controller in the name of a token's holder."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from greenroom.actors.messages.admin import Request
from greenroom.core.operations import Operation, WaitForGoal
from greenroom.http_front.admin.access import Access
from greenroom.http_front.link import Link

ANSWER_S = 30.0  # how long an operation may take that does not wait for a goal


class Controller:
    """Asks the controller in the name of a token's holder."""

    def __init__(self, link: Link, access: Access) -> None:
        self._link = link
        self.access = access

    async def request(
        self,
        operation: Operation,
        author: str,
        *,
        request_id: str = "",
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Return the operation's answer, or raise its error."""
        return await self._link.request(
            Request(
                request_id=request_id or secrets.token_hex(16),
                operation=operation.key,
                fields=operation.fields,
                user=f"token {author}",
            ),
            timeout_s,
        )

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
