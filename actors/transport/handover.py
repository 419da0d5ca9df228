"""An actor that goes on as another interpreter's program, with its pid and its address.

Theory of operation. ``exec`` replaces the program of a process and keeps its pid, so its parent and
all who watch it see nothing. Its listening sockets stay open across it, and so none of its peers
finds it dead: they dial again, and wait until the new program accepts. Connections end, and what
was on its way on them is lost as on a broken link. The new program makes the actor anew, in the way
in which Thespian starts a child, and handles one message first: the one it was started for.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, NoReturn

from thespian.system.multiprocCommon import startChild

from greenroom.actors.transport.thespian_base import Endpoint

PROGRAM = "from greenroom.actors.transport.handover import go_on; go_on()"


def hand_over(manager: Any, python: str, message: Any, sender: Any) -> NoReturn:
    """Replace this actor's process by ``python``, where ``message`` of ``sender`` comes first.

    ``manager`` is Thespian's of the actor. Greenroom must be importable there. OSError when there
    is no such program; the actor then goes on as it was.
    """
    transport, kind = manager.transport, type(manager.actorInst)
    listeners = transport.mailbox.links.listeners()
    own, admin = transport.myAddress, transport.mailbox.admin_address
    endpoint = Endpoint(None, own, manager._parentAddr, admin, [])
    endpoint.listeners, endpoint.first = listeners, (message, sender)
    arguments: tuple[Any, ...] = (
        f"{kind.__module__}.{kind.__qualname__}",
        manager.globalName,
        endpoint,
        type(transport),
        *(None, None),  # no source of its own
        manager._parentAddr,
        admin,
        own,  # to tell that it has started, which its parent knows
        manager.asLogger,
        manager._childReqs,
        manager.capabilities,
        *([], None),  # no descriptors to close; it starts no actors
        manager.logdefs,
    )
    description = os.memfd_create("greenroom-actor")
    try:
        with open(description, "wb", closefd=False) as file:
            pickle.dump(arguments, file)
        os.lseek(description, 0, os.SEEK_SET)
        for fd in (description, *listeners.values()):
            os.set_inheritable(fd, True)
        os.execv(python, [python, "-c", PROGRAM, str(description)])
    finally:
        os.close(description)
        for fd in listeners.values():
            os.set_inheritable(fd, False)


def go_on() -> None:
    """Be the actor that :func:`hand_over` has described; returns when it has ended."""
    with open(int(sys.argv.pop()), "rb") as file:
        arguments = pickle.load(file)
    startChild(*arguments)
