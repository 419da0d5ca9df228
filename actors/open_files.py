"""The limit of open files, which most systems set low for processes that wait with select()."""

from __future__ import annotations

import resource

from greenroom.core.errors import StartError

MOST = 65_536  # more than a process here can serve; some systems allow a thousand million
LEAST = 256  # an idle process has 40; each connection, replica and caller is one more


def raise_limit() -> int:
    """Raise this process's limit as far as is of use, and its children's with it; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def require_open_files() -> None:
    """Raise the limit; StartError where a host cannot work with what is allowed."""
    limit = raise_limit()
    if 0 <= limit < LEAST:
        raise StartError(
            f"this user may have {limit} files open at once (ulimit -Hn), and a host needs "
            f"{LEAST}, better thousands: raise the hard limit, by `ulimit -Hn`, LimitNOFILE= of "
            "systemd, or --ulimit nofile= of a container"
        )
