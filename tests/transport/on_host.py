"""What tests have a process of another host do: an actor system, and asks from outside of it."""

from __future__ import annotations

import logging
import os
import time

from thespian.actors import ActorSystem

from greenroom.actors.transport.thespian_base import install
from tests.transport.workers import Worker

PORT = 1900
ASK_S = 30
_system = None


def start(address, leader, side, key_file, log):
    """Start a system that leads a convention, or joins one."""
    global _system  # noqa: PLW0603  # one per process
    os.environ.update({"GREENROOM_BIND": address, "GREENROOM_KEY_FILE": str(key_file)})
    capabilities = {
        "Admin Port": PORT,
        "Convention Address.IPv4": f"{leader}:{PORT}",
        "side": side,
    }
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.getLogger("greenroom").handlers[:] = [handler]
    _system = ActorSystem(install(), capabilities, transientUnique=True)


def create(requirements=None, name=None):
    return _system.createActor(Worker, requirements, globalName=name)


def create_somehow(requirements):
    """Create an actor as soon as there is a host for it."""
    deadline = time.monotonic() + 15
    while True:
        try:
            return create(requirements)
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def ask(actor, *message, timeout_s=ASK_S):
    return _system.ask(actor, message, timeout_s)


def tell(actor, message):
    _system.tell(actor, message)
