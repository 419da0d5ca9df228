"""The types of ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Header = tuple[bytes, bytes]
Headers = list[Header]
Scope = dict[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
