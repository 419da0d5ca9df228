"""Where other hosts reach this one, and what makes them a cluster: flags, and what they need."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.actors.transport.addresses import LOOPBACK, ProcessAddress
from understudy.actors.transport.cluster_key import ClusterKeyError, ensure_key
from understudy.actors.transport.network import TLS_FILES, Way, tls_of
from understudy.actors.transport.tls import TlsError
from understudy.core.errors import InvalidRequestError, NotRunningError, StartError

if TYPE_CHECKING:
    from understudy.actors.settings import HostSettings


TLS = ("tls_cert", "tls_key", "tls_ca")
LEADS = "Understudy Leads"  # the capability of hosts on which the controller may be
NETWORK_FILE = "network.json"


def read_binding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of HostSettings that this module is about, checked."""
    bind, join = values.get("bind"), values.get("join")
    if bind is not None:
        bind = _bindable(str(bind))
    if join is not None:
        _check_join(str(join), bind)
    files = {name: values.get(name) for name in ("key_file", *TLS)}
    given = [name for name in TLS if files[name]]
    if given and len(given) < len(TLS):
        raise InvalidRequestError(
            f"{given[0]}={files[given[0]]!r}: {', '.join(TLS)} go together, or not at all"
        )
    paths = {name: Path(file).absolute() if file else None for name, file in files.items()}
    return {"bind": bind, "join": join, **paths}


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


def prepare(settings: HostSettings) -> None:
    """Make what the actor system needs of other hosts, before it starts; StartError if it cannot.

    The cluster key is made, or copied from ``key_file``, whether or not the host is bound: so it is
    there to be copied when one joins. Child processes get its path by environment.
    """
    try:
        ensure_key(settings.cluster_key, settings.key_file)
        tls_of(settings.to_environ())
    except (ClusterKeyError, TlsError) as error:
        raise StartError(str(error)) from None
    os.environ["UNDERSTUDY_KEY_FILE"] = str(settings.cluster_key)
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
    if settings.bind is None or settings.bind == LOOPBACK:
        return {}
    host, _, port = (settings.join or settings.own_address).rpartition(":")
    try:
        # Once: the admin would look it up again and again, and wait for it.
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise StartError(f"cannot join {settings.join}: {host}: {error.strerror}") from None
    leader = ProcessAddress(str(address), int(port))
    return {"Convention Address.IPv4": leader.text}


def capabilities_of(settings: HostSettings) -> dict[str, Any]:
    """Return what this host's actor system says of itself."""
    return {
        "Admin Port": settings.admin_port,
        LEADS: settings.join is None,
        **convention_of(settings),
    }


def host_id(settings: HostSettings) -> str:
    """Return what tells this host from another of its name; made at its first start."""
    path = settings.host_id_file
    if not path.exists():
        temporary = path.with_suffix(".new")
        temporary.write_text(secrets.token_hex(16), encoding="ascii")
        temporary.replace(path)
    return path.read_text(encoding="ascii").strip()


def remember(settings: HostSettings) -> None:
    """Leave for commands what they need to reach other hosts as this one does, if it does."""
    if not convention_of(settings):
        return
    known = {name: text for name, text in settings.to_environ().items() if name in TLS_FILES}
    (settings.run_dir / NETWORK_FILE).write_text(json.dumps(known), encoding="utf-8")


def way_to(settings: HostSettings) -> Way | None:
    """Return how a command or a script comes to the system it is to talk to.

    InvalidRequestError when that is another host's, and there is no key for it.
    """
    key = settings.key_file or settings.cluster_key
    environ = {name: text for name, text in settings.to_environ().items() if name in TLS_FILES}
    with contextlib.suppress(OSError, ValueError):  # of a system that never ran, or is not bound
        known = (settings.run_dir / NETWORK_FILE).read_text(encoding="utf-8")
        environ = {**json.loads(known), **environ}
    if key.exists():
        environ["UNDERSTUDY_KEY_FILE"] = str(key)
    host = settings.remote_host
    if host is None:
        return Way(None, environ)
    if "UNDERSTUDY_KEY_FILE" not in environ:
        raise InvalidRequestError(
            f"address={settings.address!r}: a system of another host takes only who has the "
            f"cluster's key; name its file with --key-file or UNDERSTUDY_KEY_FILE ({key} is not "
            "there)"
        )
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise NotRunningError(f"address={settings.address!r}: {host}: {error.strerror}") from None
    return Way(str(address), environ)
