"""Bids of hosts that may lead and do not hear who does: see core/leases.py.

Theory of operation. A bid is a file in the host's own folder, which is in the state dir that they
share, and so reaches a leader whom nothing else reaches. It has the number of other hosts whose
proxies have answered lately; they are asked for nothing but that, and only while there is a bid.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from thespian.actors import ActorAddress

from greenroom.actors.messages import Address
from greenroom.actors.port import PROXY, Port
from greenroom.actors.settings import HostSettings
from greenroom.actors.state_dir import write_private
from greenroom.actors.transport.addresses import parse_address
from greenroom.core.leases import Bid

ASK_S = 0.5
HEARD_S = 2.0  # since a host has answered: it is reached
_FILE = "bid.json"


class Bidding:
    """What this host bids; all but ``write`` and ``withdraw`` on the port's loop."""

    def __init__(self, port: Port, settings: HostSettings, place: int) -> None:
        self._port = port
        self._path = settings.own_dir / _FILE
        self._own = settings.own_address
        self._place = place
        self._number = 0
        self._is_written = False
        self._asked: dict[str, float] = {}  # since when a host owes an answer
        self._answered: dict[str, float] = {}

    def bid(self, hosts: Iterable[str], leader: str) -> Bid | None:
        """Ask hosts, by address, whether they can be reached; return what is known of that.

        None where the leader is one of those that can: then its beats are what fails.
        """
        now = time.monotonic()
        for host in {*hosts, leader} - {self._own}:
            since = max(self._asked.get(host, 0.0), self._answered.get(host, 0.0))
            if now - since > (HEARD_S if host in self._asked else ASK_S):
                self._asked[host] = now
                self._ask(host)
        reached = {host for host, at in self._answered.items() if now - at <= HEARD_S}
        self._number += 1
        return None if leader in reached else Bid(self._number, len(reached), self._place)

    def write(self, bid: Bid) -> None:
        """Let the leader see a bid; raises OSError. Blocks."""
        write_private(self._path, json.dumps(bid))
        self._is_written = True

    def withdraw(self) -> None:
        """Bid no more; raises OSError. Blocks."""
        if self._is_written:
            self._path.unlink(missing_ok=True)
            self._is_written = False

    def _ask(self, host: str) -> None:
        def located(proxy: Address | None) -> None:
            if proxy is None:
                self._asked.pop(host, None)
            else:
                self._port.ask_proxy(proxy, "controller", partial(self._heard, host))

        self._port.locate(*PROXY, located, ActorAddress(parse_address(host)))

    def _heard(self, host: str, _known: Any) -> None:
        self._asked.pop(host, None)
        self._answered[host] = time.monotonic()


def read_bids(settings: HostSettings) -> dict[str, Bid]:
    """Return all bids, by host; one that cannot be read is none. Blocks."""
    bids = {}
    for path in settings.state_dir.glob(f"hosts/*/{_FILE}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            bids[path.parent.name] = Bid(*json.loads(path.read_text(encoding="ascii")))
    return bids
