"""What a transport can be made from, and the names that Thespian asks of it before there is one."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thespian.actors import ActorAddress, ActorSystemStartupFailure
from thespian.system.transport import ExternalInterfaceTransportInit, TransportInit__Base

from greenroom.actors.transport import addresses, descriptors, identity, roles
from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.envelopes import Envelope
from greenroom.actors.transport.identity import Identity
from greenroom.actors.transport.release import own_release
from greenroom.actors.transport.sockets import is_listening, tcp_listener

LOGGER_INSTANCE = -1  # Thespian's own number for its logger process


class Endpoint(TransportInit__Base):  # type: ignore[misc]  # Thespian ships no types
    """What a parent gives to a child process to make its transport from."""

    def __init__(
        self, instance: int | None, assigned: Any, parent: Any, admin: Any, inherited: list[int]
    ) -> None:
        self.addrInst = instance  # Thespian's name for it
        self.assigned = assigned
        self.parent = parent
        self.admin = admin
        self.inherited = inherited


class ExternalCopy(TransportInit__Base):  # type: ignore[misc]
    """Asks for one more transport of a process outside the system."""


class Attach(TransportInit__Base):  # type: ignore[misc]
    """Asks for a transport on a loop that others run; ``on_envelope`` gets what arrives.

    ``gate`` is the admin of another host to belong to, None for this host's; ``environ`` says where
    the cluster's key and certificates are.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_envelope: Callable[[Envelope], None],
        gate: ProcessAddress | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.loop = loop
        self.on_envelope = on_envelope
        self.gate = gate
        self.environ = os.environ if environ is None else environ


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a transport belongs; ``parent`` is None outside the system."""

    own: ProcessAddress
    admin: Any
    parent: Any = None
    is_logger: bool = False
    gate: socket.socket | None = None  # of a process of another host's system
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def identity(self) -> Identity:
        """Return who this process is from now on, to its peers."""
        host_name = socket.gethostname().encode("ascii", "replace").decode() or "unknown"
        return Identity(
            self.own.text,
            secrets.token_hex(8),
            os.getpid(),
            host_name[: identity.MAX_TEXT],
            own_release() if self.own.host != addresses.LOOPBACK else "unknown",
        )


def place_of(init: TransportInit__Base, args: tuple[Any, ...]) -> Place:
    """Find the place of a transport; a forked child lets go of what it has of its parent."""
    if isinstance(init, Endpoint):
        roles.take_over()
        if descriptors.is_forked():
            descriptors.let_go(init.inherited)
            asyncio._set_running_loop(None)  # the parent's, which forked inside it
            signal.set_wakeup_fd(-1)  # the parent's too
        assigned = init.assigned.addressDetails if init.assigned else None
        return Place(
            own=assigned or _drawn_beside(init.admin),
            admin=init.admin,
            parent=init.parent,
            is_logger=init.addrInst == LOGGER_INSTANCE,
        )
    if isinstance(init, Attach):
        if init.gate is not None:
            return _place_outside(init.gate, init.environ)
        admin = Naming.getAdminAddr(args[0])
        return Place(own=_drawn_beside(admin), admin=admin, environ=init.environ)
    if isinstance(init, ExternalInterfaceTransportInit):
        admin = Naming.getAdminAddr(args[0])
    elif isinstance(init, ExternalCopy):
        admin = args[0]
    else:
        raise ActorSystemStartupFailure(f"no transport can be made from a {type(init)}")
    return Place(own=_drawn_beside(admin), admin=admin)


def _place_outside(gate: ProcessAddress, environ: Mapping[str, str]) -> Place:
    """Return the place of a process that belongs to another host's system.

    Replicas answer straight to whoever asked, so it has a gate of its own, at a port of its own.
    """
    host = addresses.host_towards(gate)
    listener = None if host == addresses.LOOPBACK else tcp_listener(host, 0)
    port = 0 if listener is None else listener.getsockname()[1]
    own = drawn_address(host, port)
    return Place(own=own, admin=ActorAddress(gate), environ=environ, gate=listener)


def _drawn_beside(admin: Any) -> ProcessAddress:
    return drawn_address(admin.addressDetails.host, admin.addressDetails.number)


class Naming:
    """The addresses of admins; names in camelCase are Thespian's."""

    @staticmethod
    def getAdminAddr(capabilities: dict[str, Any]) -> Any:
        """Return the address of this host's admin."""
        port = int(capabilities.get("Admin Port", addresses.ADMIN_PORT))
        return ActorAddress(ProcessAddress(addresses.host_of_admin(port), port))

    @staticmethod
    def getAddressFromString(address: Any, adminRouting: bool = False) -> Any:
        """Return the address of the admin at ``host:port``."""
        del adminRouting
        return ActorAddress(addresses.admin_address(address))

    @staticmethod
    def getConventionAddress(capabilities: dict[str, Any]) -> Any:
        """Return the addresses of the convention's leaders; None without a convention."""
        named = capabilities.get("Convention Address.IPv4")
        if not named:
            return None
        each = named if isinstance(named, list) else [named]
        return [Naming.getAddressFromString(address) for address in each]

    @staticmethod
    def probeAdmin(address: Any) -> bool:
        """Return whether a process of this user listens where the admin should."""
        return is_listening([address.addressDetails.socket_name]) is not None
