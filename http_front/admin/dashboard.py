"""The dashboard: one file of HTML, CSS and JavaScript, which asks the admin API for all it shows.

The page itself holds no data, so it takes no token. Its policy lets it run its own script and talk
to its own origin, and nothing else: no other script, style, frame or form.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("dashboard.html")


class DashboardPage:
    """``/-/dashboard``."""

    def __init__(self) -> None:
        self._content = _FILE.read_bytes()
        self._policy = policy_of(self._content.decode())

    async def on_get(self, _req: Any, resp: Any) -> None:
        """Answer with the page."""
        resp.content_type = "text/html; charset=utf-8"
        resp.data = self._content
        resp.set_header("content-security-policy", self._policy)
        resp.set_header("referrer-policy", "no-referrer")
        resp.set_header("x-frame-options", "DENY")
        resp.set_header("cross-origin-opener-policy", "same-origin")


def policy_of(html: str) -> str:
    """Return the Content-Security-Policy that allows a page what is inside it."""
    (script,), (style,) = _all_in(html, "script"), _all_in(html, "style")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",  # its icon
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _all_in(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
