"""Processes over real sockets, several of them on one loop; what they told is kept."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import time

from greenroom.actors.transport.addresses import ProcessAddress, drawn_address
from greenroom.actors.transport.cluster_key import KeyFiles, create_key, make_key
from greenroom.actors.transport.descriptors import close_loop
from greenroom.actors.transport.links import Links

DEADLINE_S = 30.0
HOST, HERE, THERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"


def open_files(pid="self"):
    """Return what a process has open, by the kernel's names: numbers are used again."""
    files = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, or what listed them
            files.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return files


@functools.cache
def key_of(cluster: int) -> bytes:
    """Return the key of one of several clusters."""
    return make_key()


class Process:
    """One process's links, and all that they told."""

    def __init__(self, loop, address=None, keys=None, gate=None):
        self.address = address or drawn_address(HOST)
        self.inbox = []
        self.done, self.dead, self.failed, self.gone, self.certain = [], [], [], [], []
        self.on_deliver = lambda: None
        self.takes = lambda: False  # what came loosely, before the turn's end
        self.taken = []
        self.raised = []
        self.links = Links(loop, self.address, self, keys, gate)
        self.links.turn_end.on_error = lambda error, _: self.raised.append(error)
        self._tags = itertools.count(1)

    def send(self, other, body=b"hello", tag=None, **how):
        tag = tag or next(self._tags)
        self.links.send(getattr(other, "address", other), [body], tag, **how)
        return tag

    @property
    def bodies(self):
        return [bytes(buffers[0]) for _, buffers in self.inbox]

    @property
    def strangers(self):
        return self.links.other_hosts.handshakes

    def cut(self, other=None):
        """Cut this end's connections, or those with one other process."""
        for each in self.links.connections(other and other.address):
            with socket.socket(fileno=os.dup(each.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def received(self, sender, buffers):
        self.inbox.append((sender.address, buffers))

    def take(self, sender, body):
        takes = self.takes()
        if takes:
            self.received(sender, [body])
            self.taken.append(body)
        return takes

    def deliver(self):
        self.on_deliver()

    def sent(self, tags):
        self.done.extend(tags)

    def undeliverable(self, tags):
        self.dead.extend(tags)

    def refused(self, tag, reason):
        self.failed.append((tag, reason))

    def peer_gone(self, address, *, is_certain):
        self.gone.append(address)
        self.certain.append(is_certain)


class World:
    def __init__(self, folder):
        self.loop = asyncio.new_event_loop()
        self.processes = []
        self._folder = folder
        self._files = itertools.count()

    def key_file(self, cluster=0):
        """Return the path of a file of its own, with the key of a cluster."""
        path = self._folder / f"cluster-{next(self._files)}.key"
        create_key(path, key_of(cluster))
        return path

    def process(self, **options):
        process = Process(self.loop, **options)
        self.processes.append(process)
        return process

    def host(self, address, port, cluster=0, keys=None):
        """Return the admin of a host that other hosts can reach, and one more process of it."""
        keys = keys or KeyFiles(self.key_file(cluster))
        return (
            self.process(address=ProcessAddress(address, port), keys=keys),
            self.process(address=drawn_address(address, port), keys=keys),
        )

    def until(self, condition, what="it happened"):
        async def wait():
            deadline = time.monotonic() + DEADLINE_S
            while not condition():
                assert time.monotonic() < deadline, f"not in time: {what}"
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(wait())

    def meet(self, one, other):
        """Have the first message of one process to another arrive; return both."""
        one.send(other)
        self.until(lambda: one.done)
        return one, other

    def pair(self):
        """Return two processes of one host that have met."""
        return self.meet(self.process(), self.process())

    def seconds_until_dead(self, one, address):
        """Send a message; return how long it took until its target was known to be dead."""
        begun = time.monotonic()
        tag = one.send(address)
        self.until(lambda: tag in one.dead)
        return time.monotonic() - begun

    def run_for(self, seconds):
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def passes(self, number=20):
        async def run():
            for _ in range(number):
                await asyncio.sleep(0)

        self.loop.run_until_complete(run())

    def close(self):
        for process in self.processes:
            process.links.close()
        close_loop(self.loop)
