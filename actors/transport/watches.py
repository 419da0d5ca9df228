"""Who wants to hear of the end of processes of other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.admission import Trouble
from greenroom.actors.transport.peers import Peers

OnLost = Callable[[bool], None]  # gets whether the process is certainly dead


class Watches:
    """What the transport of one process offers to watch others with; mixed into it."""

    peers: Peers
    _own: ProcessAddress
    _watching: dict[str, list[OnLost]]  # by the address's text

    def watch_remote(self, target: Any, on_lost: OnLost) -> Callable[[], None] | None:
        """See :class:`greenroom.actors.loop.Transport`."""
        address = target.addressDetails
        if type(address) is not ProcessAddress or address.host == self._own.host:
            return None
        watching = self._watching.setdefault(address.text, [])
        watching.append(on_lost)
        self.peers.reach(address)

        def cancel() -> None:
            if on_lost in watching:
                watching.remove(on_lost)
                if not watching and self._watching.get(address.text) is watching:
                    del self._watching[address.text]

        return cancel

    def trouble_with(self, gate: Any) -> Trouble:
        """Return why the host of an address could not be reached the last time."""
        return self.peers.trouble_with(gate.addressDetails)

    def forgotten(self, address: ProcessAddress) -> None:
        """See Shell; what the other end could not send is lost, as if it had not been reached."""
        self._tell_watchers(address, is_certain=False)

    def _tell_watchers(self, address: ProcessAddress, *, is_certain: bool) -> None:
        for on_lost in list(self._watching.get(address.text, ())):
            self.peers.loop.call_soon(on_lost, is_certain)
