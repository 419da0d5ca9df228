"""Repairs of Thespian 4.0.1's stock TCP base that need no fork of it.

Apply them before the actor system starts and in every process that joins it: :func:`apply` is
idempotent. Each repair names the trouble, seen by measurement, that it removes.
"""

from __future__ import annotations

import os
from typing import Any

# Read when IPBase is imported, so set before.
os.environ.setdefault("THESPIAN_BASE_IPADDR", "127.0.0.1")  # else it asks the default route

from thespian.system import multiprocCommon, ratelimit, transport
from thespian.system.transport import IPBase, asyncTransportBase

# Thespian allows 20 unacknowledged messages per process; beyond it *all* its sends stall, so 20
# busy or dead targets would stop everything. Measured: 300 messages to a busy actor then cost
# others 24 ms.
MAX_PENDING_TRANSMITS = 1000


def apply() -> None:
    """Repair the loaded Thespian modules in this process."""
    asyncTransportBase.MAX_PENDING_TRANSMITS = MAX_PENDING_TRANSMITS
    # Each message was formatted several times over for a log that is off.
    transport.TransmitIntent.identify = transport.ReceiveEnvelope.identify = _type_name
    # Above 4,480 messages/s each send slept 100 ms, to protect a link that is not there.
    ratelimit.RateThrottle.eventRatePause = _no_pause
    # Every socket was bound to 0.0.0.0 whatever address it advertises, and unpickles what comes.
    IPBase.IPActorAddress.bindArgs = property(_bind_where_advertised)
    # The logger's death killed the admin: it restarts the logger with an attribute that it has
    # under another name.
    multiprocCommon.MultiProcAdmin.logDefs = property(lambda admin: admin.logdefs)
    # When two children died at once, dealing with the first dropped the second unnoticed, and its
    # global name went on naming a dead address for ever.
    multiprocCommon.MultiProcReplicator._childExited = _forget_child


def _forget_child(parent: Any, address: Any) -> None:
    parent._child_procs = [
        child
        for child in getattr(parent, "_child_procs", [])
        if getattr(child, "childRealAddr", child.childAddr) != address
        or parent._checkChildLiveness(child)
    ]


def _type_name(parcel: Any) -> str:
    return type(parcel.message).__name__


def _no_pause(_throttle: Any, _now: Any) -> None:
    return None


def _bind_where_advertised(address: Any) -> tuple[tuple[str, int]]:
    return (address.sockname,)
