"""Where other hosts reach this one, and what makes them a cluster: flags, and what they need."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.actors.state_dir import write_private
from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress
from greenroom.actors.transport.cluster_key import ClusterKeyError, ensure_key
from greenroom.actors.transport.network import TLS_FILES, Way, tls_of
from greenroom.actors.transport.tls import TlsError
from greenroom.core.errors import InvalidRequestError, NotRunningError, StartError

if TYPE_CHECKING:
    from greenroom.actors.settings import HostSettings


TLS = ("tls_cert", "tls_key", "tls_ca")
LEADS = "Greenroom Leads"  # the capability of hosts on which the controller may be
MAY_LEAD = "Greenroom May Lead"  # of those on which one may be that has its host's word
NETWORK_FILE = "network.json"


def read_binding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of HostSettings that this module is about, checked."""
    bind, join, leaders = (values.get(name) for name in ("bind", "join", "leaders"))
    if bind is not None:
        bind = _bindable(str(bind))
    if join is not None:
        for each in str(join).split(","):
            _check_join(each, bind)
    files = {name: values.get(name) for name in ("key_file", *TLS)}
    given = [name for name in TLS if files[name]]
    if given and len(given) < len(TLS):
        raise InvalidRequestError(
            f"{given[0]}={files[given[0]]!r}: {', '.join(TLS)} go together, or not at all"
        )
    paths = {name: Path(file).absolute() if file else None for name, file in files.items()}
    return {"bind": bind, "join": join, "leaders": leaders, **paths}


def _bindable(bind: str) -> str:
    try:
        address = ipaddress.IPv4Address(bind)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        raise InvalidRequestError(
            f"bind={bind!r}: expected one IPv4 address of this host, by which others reach it"
        )
    return bind


def _check_join(join: str, bind: str | None) -> None:
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequestError(f"join={join!r}: expected HOST:PORT of a system that runs")
    if bind is None or bind == LOOPBACK:
        raise InvalidRequestError(
            f"join={join!r}: other hosts must reach this one too; name its address with --bind"
        )


def check_others(binding: Mapping[str, Any], admin_port: int) -> None:
    """Raise InvalidRequestError where ``join`` or ``leaders`` cannot be of a host so bound."""
    leaders, bind, join = (binding[name] for name in ("leaders", "bind", "join"))
    if join is not None and f"{bind}:{admin_port}" in str(join).split(","):
        raise InvalidRequestError(
            f"join={join!r}: {bind}:{admin_port} is this host itself; name others, or leave --join "
            "out on the host that leads"
        )
    if leaders is None:
        return
    each = str(leaders).split(",")
    for address in each:
        host, _, port = address.rpartition(":")
        try:
            ipaddress.IPv4Address(host)
            is_right = 0 < int(port) < 65536
        except ValueError:
            is_right = False
        if not is_right:
            raise InvalidRequestError(
                f"leaders={leaders!r}: {address!r} is not IP:PORT; name each host that may lead by "
                "its --bind address and admin port, in order, with commas"
            )
    if len(each) < 2 or len(set(each)) < len(each):
        raise InvalidRequestError(
            f"leaders={leaders!r}: expected two different hosts or more; a single leader needs no "
            "--leaders"
        )
    if join is not None:
        raise InvalidRequestError(
            f"leaders={leaders!r} and join={join!r}: a host may lead, or joins those "
            "that do; give one of them"
        )
    if f"{bind}:{admin_port}" not in each:
        raise InvalidRequestError(
            f"leaders={leaders!r}: this host, {bind or 'without --bind'}:{admin_port}, is not "
            "among them; name it, or have it join with --join"
        )


def prepare(settings: HostSettings) -> None:
    """Make what the actor system needs of other hosts, before it starts; StartError if it cannot.

    The cluster key is made, or copied from ``key_file``, whether or not the host is bound: so it is
    there to be copied when one joins. Child processes get its path by environment.
    """
    if settings.join and settings.key_file is None and not settings.cluster_key.exists():
        raise StartError(
            f"cannot join {settings.join} without the cluster's key: copy cluster.key from the "
            "state dir of a host that runs, and name the copy with --key-file"
        )
    try:
        ensure_key(settings.cluster_key, settings.key_file)
        tls_of(settings.to_environ())
    except (ClusterKeyError, TlsError) as error:
        raise StartError(str(error)) from None
    os.environ["GREENROOM_KEY_FILE"] = str(settings.cluster_key)
    if settings.bind is not None:
        _try_address(settings.bind)


def _try_address(bind: str) -> None:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind((bind, 0))
        except OSError as error:
            raise StartError(
                f"cannot listen on {bind}: {error.strerror}; --bind must be an address of this host"
            ) from None


def convention_of(settings: HostSettings) -> dict[str, str]:
    """Return Thespian's capability that makes a bound host join another, or lead."""
    if not is_bound(settings) or settings.leaders or len(settings.gates) > 1:
        return {}  # where leaders take turns, this host's own processes look for them (joining.py)
    # Once: the admin would look it up again and again, and wait for it.
    address = resolved_gates(settings)[0] if settings.join else settings.own_address
    return {"Convention Address.IPv4": address}


def is_bound(settings: HostSettings) -> bool:
    """Tell whether other hosts can reach this one."""
    return settings.bind is not None and settings.bind != LOOPBACK


def resolved_gates(settings: HostSettings) -> list[str]:
    """Return the ``gates`` of a host by address; StartError where a name has none."""
    found = []
    for gate in settings.gates:
        host, _, port = gate.rpartition(":")
        try:
            address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        except OSError as error:
            raise StartError(f"cannot join {gate}: {host}: {error.strerror}") from None
        found.append(ProcessAddress(str(address), int(port)).text)
    return found


def capabilities_of(settings: HostSettings) -> dict[str, Any]:
    """Return what this host's actor system says of itself."""
    return {
        "Admin Port": settings.admin_port,
        LEADS: settings.join is None and not settings.leaders,
        MAY_LEAD: bool(settings.leaders),
        **convention_of(settings),
    }


def host_id(settings: HostSettings) -> str:
    """Return what tells this host from another of its name; made at its first start."""
    path = settings.host_id_file
    if not path.exists():
        write_private(path, secrets.token_hex(16))
    return path.read_text(encoding="ascii").strip()


def remember(settings: HostSettings) -> None:
    """Leave for commands what they need to reach other hosts as this one does, if it does."""
    if not is_bound(settings):
        return
    known = {name: text for name, text in settings.to_environ().items() if name in TLS_FILES}
    write_private(settings.run_dir / NETWORK_FILE, json.dumps(known))


def way_to(settings: HostSettings) -> Way | None:
    """Return how a command or a script comes to the system it is to talk to.

    InvalidRequestError when that is another host's, and there is no key for it, or none that this
    user may look at.
    """
    key = settings.key_file or settings.cluster_key
    environ = {name: text for name, text in settings.to_environ().items() if name in TLS_FILES}
    with contextlib.suppress(OSError, ValueError):  # of a system that never ran, or is not bound
        known = (settings.run_dir / NETWORK_FILE).read_text(encoding="utf-8")
        environ = {**json.loads(known), **environ}
    try:
        if key.exists():
            environ["GREENROOM_KEY_FILE"] = str(key)
    except OSError as error:
        raise InvalidRequestError(
            f"the cluster key {key} cannot be looked at: {error.strerror}; run this as the "
            "system's user, or name a key of your own with --key-file"
        ) from None
    if not settings.remote_addresses:
        return Way((), environ)
    if "GREENROOM_KEY_FILE" not in environ:
        raise InvalidRequestError(
            f"address={settings.address!r}: a system of another host takes only who has the "
            f"cluster's key; name its file with --key-file or GREENROOM_KEY_FILE ({key} is not "
            "there)"
        )
    return Way(tuple(_resolved(settings.remote_addresses)), environ)


def _resolved(addresses: Iterable[str]) -> list[str]:
    """Return addresses by number, without names that there are not; NotRunningError for none."""
    found, trouble = [], []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            found.append(f"{socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]}:{port}")
        except OSError as error:
            trouble.append(f"address={address!r}: {host}: {error.strerror}")
    if not found:
        raise NotRunningError("; ".join(trouble))
    return found
