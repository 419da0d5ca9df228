"""A scrape: the metrics of this host, and of all hosts of the cluster.

Each host's proxy has those of its host. The controller says which hosts there are. One that does
not answer in time is left out: a scrape has no use for answers that come later.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.actors.messages.admin import RequestReply, request_of
from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.port import PROXY, Port
from greenroom.core.metrics import Group, text
from greenroom.core.operations import ListHosts

OWN_TIMEOUT_S = 3.0
OTHERS_TIMEOUT_S = 1.5  # for all that another host is asked


class Scrapes:
    """Asks proxies, from an HTTP worker's place in the actor system; ``own`` is its address."""

    def __init__(self, port: Port, own: str) -> None:
        self._port = port
        self._own = own
        self._asked: dict[str, Callable[[Any], None]] = {}  # of the controller, by request
        port.on(RequestReply, self._replied)

    async def text(self, proxy: Address, *, whole: bool) -> bytes:
        """Return the metrics of this host, or of the whole cluster, as Prometheus' text."""
        own = self._of_proxy(proxy, OWN_TIMEOUT_S)
        others = self._others(proxy) if whole else _nothing()
        groups = await asyncio.gather(own, others)
        return text([*groups[0], *groups[1]])

    async def _others(self, proxy: Address) -> list[Group]:
        addresses = await self._hosts(proxy)
        every = [self._of_host(each) for each in addresses if each != self._own]
        return [group for groups in await asyncio.gather(*every) for group in groups]

    async def _hosts(self, proxy: Address) -> list[str]:
        """Return the addresses of all hosts; none while there is no controller."""
        known = await self._wait(partial(self._port.ask_proxy, proxy, "controller"))
        if known is None:
            return []
        request = request_of(ListHosts(), secrets.token_hex(8))

        def ask(on_reply: Callable[[Any], None]) -> None:
            self._asked[request.request_id] = on_reply
            self._port.loop.send(known[0], request)

        try:
            return list(await self._wait(ask) or ())
        finally:
            self._asked.pop(request.request_id, None)

    def _replied(self, reply: RequestReply, _sender: Address) -> None:
        on_reply = self._asked.get(reply.request_id)
        if on_reply is not None:
            on_reply(reply.value)

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
