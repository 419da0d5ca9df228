"""What a name may be, so that it can be a store's key and part of a file's name."""

from __future__ import annotations

MAX_NAME_BYTES = 75  # application#deployment#hash, with what a store puts before it, is one key
HOOKS = frozenset({"reconfigure", "check_health"})  # methods of a class for its replica alone
MAX_TAG_BYTES = 150  # of a backend or an endpoint of its own, which stands alone


def wrong_with(name: object, most_bytes: int = MAX_NAME_BYTES) -> str | None:
    """Say what a name should have been, or None where it is well."""
    if not isinstance(name, str) or not name or "#" in name:
        return "expected a name without '#'"
    if not name.isprintable():
        return "expected printable characters"
    size = len(name.encode())
    if size > most_bytes:
        return f"expected at most {most_bytes} bytes in UTF-8; it has {size}"
    return None
