"""``/api/logs``: the log files of any host, for the dashboard, as they grow.

Logs stay where they are written. Those of this host are read here, those of another by its proxy.
"""

from __future__ import annotations

import asyncio
from typing import Any

from greenroom.actors.runtime.logs import end_of_log
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import InvalidRequestError, NotRunningError, UnknownNameError
from greenroom.core.operations import GetStatus
from greenroom.http_front.admin.access import Controller
from greenroom.http_front.admin.answers import asked, write
from greenroom.http_front.link import Link


class LogsResource:
    """The names, or with ``log=NAME`` its end, and ``after=OFFSET`` what follows."""

    def __init__(self, settings: HostSettings, controller: Controller, link: Link) -> None:
        self._folder = settings.logs_dir
        self._own = settings.host_name
        self._controller = controller
        self._link = link

    async def on_get(self, req: Any, resp: Any) -> None:
        """Answer with the names of the logs, or with lines of one."""
        request = asked(req)
        holder = await self._controller.holder(request.head, "viewer")
        query = request.query()
        host, log, after = (query.pop(name, None) for name in ("host", "log", "after"))
        if query:
            raise InvalidRequestError(f"query {', '.join(query)}: expected host, log and after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 20):
            raise InvalidRequestError(f"after={after!r}: must be the next of an earlier answer")
        offset = None if after is None else int(after)
        if host in {None, self._own}:
            read = await asyncio.to_thread(end_of_log, self._folder, log, offset)
        else:
            address = await self._address(host, holder.name)
            read = await self._link.ask_host(address, "logs", log, offset)
            if read is None:
                raise NotRunningError(f"host {host!r} does not answer")
        if not read:
            raise UnknownNameError(f"no log is named {str(log)[:200]!r}")
        write(resp, {"host": host or self._own, **read})

    async def _address(self, host: str, author: str) -> str:
        status = await self._controller.request(GetStatus(), author)
        addresses: dict[str, str] = {each["name"]: each["address"] for each in status["hosts"]}
        if host not in addresses:
            known = ", ".join(sorted(addresses))
            raise UnknownNameError(f"no host is named {host[:200]!r}; there are: {known}")
        return addresses[host]
