"""A scrape: the metrics of this host, and of all hosts of the cluster.

Each host's proxy has those of its host. The controller says which hosts there are. One that does
not answer in time is left out: a scrape has no use for answers that come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.port import PROXY, Port
from greenroom.core.metrics import Group, text

OWN_TIMEOUT_S = 3.0
OTHERS_TIMEOUT_S = 1.5  # for all that another host is asked


class Scrapes:
    """Asks proxies, from an HTTP worker's place in the actor system.

    ``own`` is this host's address; ``hosts`` returns those of all, none while it cannot be known.
    """

    def __init__(self, port: Port, own: str, hosts: Callable[[], Awaitable[list[str]]]) -> None:
        self._port = port
        self._own = own
        self._hosts = hosts

    async def text(self, proxy: Address, *, whole: bool) -> bytes:
        """Return the metrics of this host, or of the whole cluster, as Prometheus' text."""
        own = self._of_proxy(proxy, OWN_TIMEOUT_S)
        others = self._others() if whole else _nothing()
        groups = await asyncio.gather(own, others)
        return text([*groups[0], *groups[1]])

    async def _others(self) -> list[Group]:
        addresses = await self._hosts()
        every = [self._of_host(each) for each in addresses if each != self._own]
        return [group for groups in await asyncio.gather(*every) for group in groups]

    async def _of_host(self, address: str) -> list[Group]:
        gate = self._port.loop.machine.address_of(address)
        proxy = await self._wait(lambda found: self._port.locate(*PROXY, found, gate))
        return [] if proxy is None else await self._of_proxy(proxy, OTHERS_TIMEOUT_S)

    async def _of_proxy(self, proxy: Address, timeout_s: float) -> list[Group]:
        ask = partial(self._port.ask_proxy, proxy, "metrics")
        return await self._wait(ask, timeout_s) or []

    async def _wait(
        self, ask: Callable[[Callable[[Any], None]], None], timeout_s: float = OTHERS_TIMEOUT_S
    ) -> Any:
        """Return what a question is answered with, None past the time limit."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ask(lambda value: None if answer.done() else answer.set_result(value))
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        return answer.result() if done else None


async def _nothing() -> list[Group]:
    return []
