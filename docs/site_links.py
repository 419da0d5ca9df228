"""A hook of MkDocs: links to files of the repository that are no pages become plain text."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./[^)\s]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Take the target from links out of docs/; tests/docs/test_links.py checks them as they are."""
    return _OUTSIDE.sub(r"\2", markdown)
