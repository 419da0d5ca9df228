"""What a process must know to talk to those of other hosts; read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress
from greenroom.actors.transport.cluster_key import ClusterKeyError
from greenroom.actors.transport.key_files import KeyFiles, Keys
from greenroom.actors.transport.tls import Tls, TlsError

TLS_FILES = ("GREENROOM_TLS_CERT", "GREENROOM_TLS_KEY", "GREENROOM_TLS_CA")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The cluster's keys, and TLS where hosts use it; this host's address is the process's own."""

    keys: Keys = field(repr=False)
    tls: Tls | None = None


class Way(NamedTuple):
    """How a process that is no actor comes to a system, where its environment does not say it."""

    gates: tuple[str, ...]  # IP:PORT of hosts of another system; empty for this host's
    environ: Mapping[str, str]  # where the cluster's key and certificates are


def network_of(own: ProcessAddress, environ: Mapping[str, str]) -> Network | None:
    """Return the network of the process at ``own``; None on a host that is not bound to one.

    ClusterKeyError and TlsError when the files cannot be used. Without a key an admin raises too;
    any other process, such as a command, then reaches this host's processes only.
    """
    if own.host == LOOPBACK:
        return None
    path = environ.get("GREENROOM_KEY_FILE")
    if not path:
        if own.is_admin:
            raise ClusterKeyError(
                f"a system bound to {own.host} needs the cluster's key: name its file with "
                "GREENROOM_KEY_FILE"
            )
        return None
    return Network(keys=KeyFiles(Path(path)), tls=tls_of(environ))


def tls_of(environ: Mapping[str, str]) -> Tls | None:
    """Return what the TLS files hold; None without any, TlsError when they cannot be used."""
    files = [environ.get(name) for name in TLS_FILES]
    if not any(files):
        return None
    if not all(files):
        raise TlsError(f"{', '.join(TLS_FILES)} go together, or not at all")
    certificate, key, ca = (Path(file or "") for file in files)
    return Tls.load(certificate, key, ca)
