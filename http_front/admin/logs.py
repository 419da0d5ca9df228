"""A host's log files, for the dashboard: their names, and their ends as they grow.

An answer has MAX_BYTES at most. Which host's files they are is said in it: that of the worker which
answers, for logs stay where they are written.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import InvalidRequestError, UnknownNameError
from greenroom.http_front.admin.access import Access
from greenroom.http_front.admin.answers import asked, write

MAX_BYTES = 128 * 1024
MAX_LOGS = 500


class LogsResource:
    """``/api/logs``: the names, or with ``log=NAME`` its end, and ``after=OFFSET`` what follows."""

    def __init__(self, settings: HostSettings, access: Access) -> None:
        self._folder = settings.logs_dir
        self._host = settings.host_name
        self._access = access

    async def on_get(self, req: Any, resp: Any) -> None:
        """Answer with the names of the logs, or with lines of one."""
        request = asked(req)
        await self._access.holder(request.head, "viewer")
        query = request.query()
        log, after = query.pop("log", None), query.pop("after", None)
        if query:
            raise InvalidRequestError(f"query {', '.join(query)}: expected log and after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 20):
            raise InvalidRequestError(f"after={after!r}: must be the next of an earlier answer")
        if log is None:
            answer = await asyncio.to_thread(names, self._folder)
            write(resp, {"host": self._host, "logs": answer})
            return
        read = await asyncio.to_thread(
            lines, self._folder, log, None if after is None else int(after)
        )
        write(resp, {"host": self._host, "log": log, **read})


def names(folder: Path) -> list[dict[str, Any]]:
    """Return the logs, those that were written last first."""
    found: list[dict[str, Any]] = []
    for path in folder.glob("*.log"):
        try:
            state = path.stat()
        except OSError:  # deleted meanwhile
            continue
        found.append({"log": path.stem, "bytes": state.st_size, "written_at": state.st_mtime})
    return sorted(found, key=lambda each: each["written_at"], reverse=True)[:MAX_LOGS]


def lines(folder: Path, log: str, after: int | None) -> dict[str, Any]:
    """Return whole lines of a log: its last ones, or those after an offset.

    ``next`` is the offset to go on from, and ``skipped`` whether there are some before these that
    were not asked for. A log that is shorter than the offset was rotated, and begins anew.
    """
    if log not in {path.stem for path in folder.glob("*.log")}:
        raise UnknownNameError(f"no log is named {log[:200]!r}")
    with (folder / f"{log}.log").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        first = max(0, size - MAX_BYTES)
        begin = first if after is None or after > size else max(after, first)
        file.seek(begin)
        content = file.read(MAX_BYTES)
    is_skipped = begin > (0 if after is None or after > size else after)
    if is_skipped:
        begin += content.find(b"\n") + 1
        content = content[content.find(b"\n") + 1 :]
    whole = content[: content.rfind(b"\n") + 1]
    text = whole.decode("utf-8", "replace")
    return {"lines": text.splitlines(), "next": begin + len(whole), "skipped": is_skipped}
