"""How WebSockets end: close codes and reasons, RFC 6455 section 7.4."""

from __future__ import annotations

MAX_REASON_BYTES = 123  # what a control frame has room for beside the code

NORMAL = 1000
WITHOUT_CODE = 1005  # never on the wire: the peer closed and gave none
ABNORMAL = 1006  # never on the wire: the peer is gone without closing
FAILED = 1011
RESTARTING = 1012


def check_code(code: int) -> None:
    """Raise ValueError for a code that may not be sent."""
    defined = 1000 <= code <= 1014 and code not in {1004, WITHOUT_CODE, ABNORMAL}
    if not (defined or 3000 <= code <= 4999):
        raise ValueError(
            f"WebSocket close code {code!r}: expected 1000 to 1014 without 1004, 1005 and 1006, "
            "or 3000 to 4999"
        )


def close_frame(code: int, reason: str = "") -> bytes:
    """Return code and reason as they travel; a reason that is too long loses its end."""
    kept = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
    return code.to_bytes(2, "big") + kept.decode("utf-8", "ignore").encode()


def close_of(frame: bytes) -> tuple[int, str]:
    """Return code and reason of what :func:`close_frame` made."""
    return int.from_bytes(frame[:2], "big"), frame[2:].decode("utf-8", "replace")
