"""What tests have a process of another host do: an actor system, and asks from outside of it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import threading
import time
from pathlib import Path

from thespian.actors import ActorSystem

from greenroom.actors.transport.base import install
from greenroom.actors.transport.frames import DATA, HEADER, Hello
from tests.transport.workers import Worker

PORT = 1900
ASK_S = 30
_system = None
_wiretap = None


def start(address, leader, side, key_file, log, environ=None):
    """Start a system that leads a convention, or joins one."""
    global _system  # noqa: PLW0603  # one per process
    os.environ.update(
        {"GREENROOM_BIND": address, "GREENROOM_KEY_FILE": str(key_file), **(environ or {})}
    )
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


class Wiretap:
    """Records all that passes through the cable."""

    def __init__(self):
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        self._socket.bind(("cable", 0))
        self._socket.settimeout(0.1)
        self._heard = []
        self._is_over = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self):
        while not self._is_over:
            with contextlib.suppress(TimeoutError):
                self._heard.append(self._socket.recv(70_000))

    def close(self):
        self._is_over = True
        self._thread.join()
        self._socket.close()
        return b"".join(self._heard)


def listen_in():
    global _wiretap  # noqa: PLW0603  # one per process
    _wiretap = Wiretap()


def heard():
    return _wiretap.close()


def ask(actor, *message, timeout_s=ASK_S):
    return _system.ask(actor, message, timeout_s)


def timed_ask(actor, *message):
    """Return the answer and how many seconds it took."""
    begun = time.monotonic()
    answer = _system.ask(actor, message, 30)
    return answer, time.monotonic() - begun


def tell(actor, message):
    _system.tell(actor, message)


def listeners():
    """Return what ss says listens on TCP here."""
    listed = subprocess.run(
        ["ss", "-ltnH"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return sorted(line.split()[3] for line in listed)


class Bomb:
    """Makes a file, named after the host too, where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return explode, (self.path,)


def explode(path):
    Path(f"{path}-{os.environ.get('GREENROOM_BIND', 'here')}").touch()


def send_bombs(admin, path):
    """Try to have a host of another cluster unpickle; return what its port said.

    One bomb goes as a message. The other is thrown at the port, as a frame.
    """
    _system.tell(admin, Bomb(path))
    bomb = pickle.dumps(Bomb(path))
    frame = HEADER.pack(DATA, 1, len(bomb), 1, 0) + bomb
    heard = b""
    place = (admin.addressDetails.host, admin.addressDetails.number)
    with socket.create_connection(place) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(Hello("x:70000", "unknown", 1, 1, 0, 0).frame() + frame * 3)
        while piece := stranger.recv(1000):
            heard += piece
    return heard
