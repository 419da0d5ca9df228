"""One process's messages, over its links: what our own code sends, receives and watches by.

Theory of operation. A mailbox belongs to an asyncio loop. What arrives waits in its :class:`Inbox`
until the loop has it handled. What is sent is :class:`Unfinished` until its outcome is known: that
of a :class:`Delivery` of our own code, or of an intent of Thespian's, which has the same
``targetAddr`` and ``tx_done``.

An actor's mailbox is in the hands of Thespian (thespian_base.py). A process that is no actor, such
as a worker of the HTTP front or a script, *attaches* one to a loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import LogRecord
from time import monotonic
from typing import Any

from thespian.actors import ActorAddress
from thespian.system.messages.multiproc import EndpointConnected
from thespian.system.transport import ReceiveEnvelope, SendStatus

from greenroom.actors.messages.queries import FITTED, PLAIN, RESTORED
from greenroom.actors.transport import descriptors
from greenroom.actors.transport.addresses import (
    LOOPBACK,
    Access,
    ProcessAddress,
    admin_of_port,
    drawn_address,
    drawn_for,
    host_towards,
    parse_address,
)
from greenroom.actors.transport.admission import Trouble
from greenroom.actors.transport.beats import BeatLink
from greenroom.actors.transport.cluster_key import ClusterKeyError, keys_of
from greenroom.actors.transport.frames import MAX_BUFFERS, Buffer
from greenroom.actors.transport.links import Links, Peer
from greenroom.actors.transport.sockets import tcp_listener
from greenroom.core import formats
from greenroom.core.formats import OURS

logger = logging.getLogger(__name__)

Callback = Callable[[], None]
OnGone = Callable[[bool], None]  # gets whether the process is certainly dead


# --- Messages as bytes, and as the envelopes that Thespian gets -----------------------------------


class Envelope(ReceiveEnvelope):  # type: ignore[misc]  # Thespian ships no types
    """A message with its sender's address.

    ``size`` is what came for it, in bytes; nothing came for what this process sends itself.
    """

    __slots__ = ("message", "sender", "size")

    def __init__(self, sender: Any, message: Any, size: int = 0) -> None:
        self.sender = sender
        self.message = message
        self.size = size

    def identify(self) -> Any:
        """Return what prints as a description; Thespian asks for one for a log that is off."""
        return self

    def __str__(self) -> str:
        return str(ReceiveEnvelope.identify(self))


def encode(message: Any) -> list[Buffer]:
    """Pickle a message: the pickle first, then the buffers that are not copied into it.

    Whatever pickling raises passes through; Thespian waits on CannotPickleAddress.
    """
    if make_plain := PLAIN.get(type(message)):
        message = make_plain(message)
    pickled: list[pickle.PickleBuffer] = []
    first = pickle.dumps(message, protocol=5, buffer_callback=pickled.append)
    if not pickled:
        return [first]
    if len(pickled) >= MAX_BUFFERS:
        return [pickle.dumps(message, protocol=5)]
    return [first, *map(_frozen, pickled)]


def decode(buffers: list[Buffer], *, is_exact: bool = True) -> Any:
    """Make the message that ``encode`` was given again; raises whatever unpickling does.

    It is not ``is_exact`` if a process of another format sent it.
    """
    if not is_exact:
        loaded = formats.read(buffers[0], buffers[1:])
    elif len(buffers) == 1:
        loaded = pickle.loads(buffers[0])
    else:
        loaded = pickle.loads(buffers[0], buffers=buffers[1:])
    if type(loaded) is not tuple:
        return loaded
    makers = RESTORED if is_exact else FITTED
    return makers[loaded[0]](*loaded[1:])


def _frozen(buffer: pickle.PickleBuffer) -> Buffer:
    """Return its bytes as they are now: a message is what it was when it was sent."""
    raw = buffer.raw()
    return raw if raw.readonly else bytes(raw)


class Delivery:
    """A message of our own code on its way: what Thespian's TransmitIntent is, at a tenth of it.

    It has no time limit: it ends when it is acknowledged, or with its target.
    """

    __slots__ = ("kind", "on_failed", "on_sent", "targetAddr")

    def __init__(
        self, target: Any, kind: type, on_sent: Callback | None, on_failed: Callback | None
    ) -> None:
        self.targetAddr = target
        self.kind = kind
        self.on_sent = on_sent
        self.on_failed = on_failed

    def tx_done(self, status: Any) -> None:
        """Call back."""
        callback = self.on_sent if status is SendStatus.Sent else self.on_failed
        if callback is not None:
            callback()


# --- Messages that wait for their handler ---------------------------------------------------------
#
# Theory of operation. A handler may take long, and meanwhile the loop must write what handlers send
# and read what peers answer. So after ``SLICE_S`` of handling, the loop gets its turn, and the
# remaining messages are handled after that. But the loop then reads more messages. It acknowledges
# what it reads, and only unacknowledged messages hold their sender back. So once more than
# ``MAX_WAITING_BYTES`` wait, they are handled before anything else is read.

SLICE_S = 0.005
MAX_WAITING_BYTES = 1024 * 1024


class Inbox(deque[Envelope]):
    """Envelopes in the order of their arrival, and what handles them; while that is None they wait.

    ``handle_ours(message, sender)`` gets our own messages, past Thespian.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.handle: Callable[[Envelope], object] | None = None
        self.handle_ours: Callable[[Any, Any], object] | None = None
        self._loop = loop
        self._is_delivering = False  # or will soon

    def deliver(self) -> None:
        """Handle what has arrived, in slices."""
        if self._is_delivering or not self:
            return
        self._is_delivering = True  # what a handler does begins no other one
        try:
            if self.handle is not None:
                for envelope in self.take_slice():
                    if self.handle_ours is not None and type(envelope.message) in OURS:
                        self.handle_ours(envelope.message, envelope.sender)
                    else:
                        self.handle(envelope)
                    if self.handle is None:
                        break
        finally:
            self._is_delivering = bool(self) and self.handle is not None
            if self._is_delivering:
                self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_delivering = False
        self.deliver()

    def take_slice(self) -> Iterator[Envelope]:
        """Remove and yield what is to be handled before the loop gets its turn."""
        ends_at = monotonic() + SLICE_S
        for _ in range(len(self)):
            yield self.popleft()
            if monotonic() > ends_at:
                break
        else:
            return
        waiting = sum(each.size for each in self)
        while waiting >= MAX_WAITING_BYTES:
            envelope = self.popleft()
            waiting -= envelope.size
            yield envelope


class Unfinished(dict[Any, None]):
    """What was sent and has no outcome yet; copied to be iterated, as threads add to it."""

    on_finished: Callback | None = None

    def finish(self, tag: Any, status: Any) -> None:
        """End what is unfinished."""
        if tag in self:
            del self[tag]
            tag.tx_done(status)
            if self.on_finished is not None:
                self.on_finished()

    def finish_sent_to(self, target: Any) -> None:
        """End all that was sent to a process that is dead."""
        for tag in [each for each in list(self) if each.targetAddr == target]:
            self.finish(tag, SendStatus.DeadTarget)


# --- The mailbox ----------------------------------------------------------------------------------


class Mailbox:
    """The messages of the process at ``own``, on ``loop``.

    OSError where its address is taken, ClusterKeyError where the cluster's file cannot be used.
    """

    deliveries_at_once = 256  # to one target, before what gathers is better sent as one message

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        admin: Any,
        environ: Mapping[str, str] = os.environ,
        gate: socket.socket | None = None,
    ) -> None:
        self.loop = loop
        self.address = ActorAddress(own)
        self.admin_address = admin
        self.inbox = Inbox(loop)
        self.unfinished = Unfinished()
        # Takes what ``send`` is given for an address that only Thespian knows.
        self.forward: Callable[[Any, Any, Callback | None, Callback | None], None] | None = None
        self._own = own
        self._pid = os.getpid()
        self._is_closed = False
        self._watching: dict[str, list[OnGone]] = {}  # by the address's text
        try:
            self.links = Links(loop, own, self, keys_of(own, environ), gate)
        except (OSError, ClusterKeyError):
            if gate is not None:
                gate.close()
            raise
        self.turn_end = self.links.turn_end
        descriptors.release_in_children(self)

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        return [] if self._is_closed else self.links.descriptors()

    def close(self) -> None:
        """Fail what is unfinished, and let go of everything."""
        if not self._is_closed:
            self.inbox.handle = self.inbox.handle_ours = None
            for tag in list(self.unfinished):
                self.unfinished.finish(tag, SendStatus.Failed)
            self.links.close()
            self._is_closed = True

    def on_loop(self, callback: Callable[..., None], *args: Any) -> None:
        """Call on the loop's thread: at once where this is it, else soon."""
        if asyncio._get_running_loop() is self.loop:
            callback(*args)
        else:
            self.post(callback, *args)

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Call soon, from any thread; RuntimeError in a fork of the process, or when closed."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this actor system connection was made by process {self._pid}; after a fork, "
                "make a new ActorSystem in the child"
            )
        self.loop.call_soon_threadsafe(callback, *args)

    # --- Sending ------------------------------------------------------------------------------

    def send(
        self, target: Any, message: Any, on_sent: Callback | None, on_failed: Callback | None
    ) -> None:
        """Send; then one of the callbacks, once that has arrived or failed; on the loop's thread.

        The acknowledgement is not urgent, so it may come with others.
        """
        if self.forward is not None and type(target.addressDetails) is not ProcessAddress:
            self.forward(target, message, on_sent, on_failed)
        else:
            self._deliver(target, message, encode(message), on_sent, on_failed)

    def send_loosely(self, target: Any, message: Any) -> None:
        """Send what nobody asks the outcome of: at once, where that is possible."""
        address = target.addressDetails
        if type(address) is not ProcessAddress:
            self.send(target, message, None, None)
            return
        buffers = encode(message)
        if not self.links.send_loosely(address, buffers):
            self._deliver(target, message, buffers, None, None)

    def _deliver(
        self,
        target: Any,
        message: Any,
        buffers: list[Buffer],
        on_sent: Callback | None,
        on_failed: Callback | None,
    ) -> None:
        delivery = Delivery(target, type(message), on_sent, on_failed)
        self.unfinished[delivery] = None
        self.put(delivery, message, buffers, delays_ack=True)

    def put(
        self, tag: Any, message: Any, buffers: list[Buffer], *, delays_ack: bool = False
    ) -> None:
        """Send an unfinished message; on the loop's thread."""
        address = tag.targetAddr.addressDetails
        if type(address) is not ProcessAddress:
            logger.error("a %s has an address that is not known here", type(message).__name__)
            self.loop.call_soon(self.unfinished.finish, tag, SendStatus.DeadTarget)
        elif address.text == self._own.text:
            self.loop.call_soon(self._to_self, tag, message)
        else:
            self.links.send(address, buffers, tag, delays_ack=delays_ack)

    def _to_self(self, tag: Any, message: Any) -> None:
        self.unfinished.finish(tag, SendStatus.Sent)
        self.arrive(message)

    # --- What the links report: a Shell -------------------------------------------------------

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """See :class:`~greenroom.actors.transport.links.Shell`."""
        address = sender.sender or _known(sender)
        try:
            message = decode(buffers, is_exact=sender.has_our_format)
        except Exception:
            logger.exception("cannot read a message of %s: it is dropped", sender.address)
            return
        envelope = Envelope(address, message, sum(map(len, buffers)))
        if type(message) is EndpointConnected:
            self.inbox.appendleft(envelope)  # what was sent to the child waits for its address
        else:
            self.inbox.append(envelope)

    def take(self, sender: Peer, body: bytes) -> bool:
        """See Shell."""
        inbox = self.inbox
        if inbox or inbox.handle is None or inbox.handle_ours is None:
            return False
        try:
            message = decode([body], is_exact=sender.has_our_format)
        except Exception:  # ``received`` says so
            return False
        if type(message) not in OURS:
            return False
        inbox.handle_ours(message, sender.sender or _known(sender))
        return True

    def arrive(self, message: Any) -> None:
        """Take what this process sends itself."""
        self.inbox.append(Envelope(self.address, message))
        self.inbox.deliver()

    def deliver(self) -> None:
        """See Shell."""
        self.inbox.deliver()

    def sent(self, tags: Sequence[object]) -> None:
        """See Shell."""
        for tag in tags:
            self.unfinished.finish(tag, SendStatus.Sent)

    def undeliverable(self, tags: Sequence[object]) -> None:
        """See Shell."""
        for tag in tags:
            self.unfinished.finish(tag, SendStatus.DeadTarget)

    def refused(self, tag: object, reason: str) -> None:
        """See Shell."""
        if not isinstance(getattr(tag, "message", None), LogRecord):  # it would log without end
            logger.error("a message was not sent: %s", reason)
        self.loop.call_soon(self.unfinished.finish, tag, SendStatus.Failed)

    def peer_gone(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """See Shell; what it could not send to a process that it had given up is lost, too."""
        for on_gone in list(self._watching.get(address.text, ())):
            self.loop.call_soon(on_gone, is_certain)

    # --- Other hosts --------------------------------------------------------------------------

    @property
    def starved_s(self) -> float:
        """For how long links that were needed could not be made for lack of descriptors."""
        return self.links.shortage.lasted_s(self.loop.time())

    def is_here(self, target: Any) -> bool:
        """Return whether ``target`` is on this host."""
        address = target.addressDetails
        return type(address) is ProcessAddress and address.host == self._own.host

    def watch_remote(self, target: Any, on_gone: OnGone) -> Callback | None:
        """Call back whenever the process at ``target`` has died or cannot be reached any more.

        ``on_gone`` gets whether it is certainly dead. Returns a canceller; None when ``target`` is
        on this host, where pidfds tell.
        """
        address = target.addressDetails
        if type(address) is not ProcessAddress or address.host == self._own.host:
            return None
        watching = self._watching.setdefault(address.text, [])
        watching.append(on_gone)
        self.links.reach(address)

        def cancel() -> None:
            if on_gone in watching:
                watching.remove(on_gone)
                if not watching and self._watching.get(address.text) is watching:
                    del self._watching[address.text]

        return cancel

    def beat_link(self, target: Any, on_answer: Callable[[bytes], None]) -> BeatLink | None:
        """Return a link for beats to a process of another host; None for one of this host."""
        others = self.links.other_hosts
        return None if others is None else others.beat_link(target.addressDetails, on_answer)

    def answer_beats(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer the beats of other processes so from now on; until then each is its own answer."""
        if self.links.other_hosts is not None:
            self.links.other_hosts.answer_beat = answer

    def try_host(self, gate: Any) -> None:
        """See whether another host still answers, on every connection with it."""
        self.links.try_host(gate.addressDetails)

    def trouble_with(self, gate: Any) -> Trouble:
        """Return why the host of an address could not be reached the last time."""
        return self.links.admission.trouble_with(gate.addressDetails)


def _known(peer: Peer) -> Any:
    """Return a peer's address, as its messages have it."""
    peer.sender = ActorAddress(peer.address)
    return peer.sender


def attach(
    admin_port: int,
    loop: asyncio.AbstractEventLoop,
    take: Callable[[Any, Any], object],
    access: Access | None = None,
) -> Mailbox:
    """Give this process, which is no actor, a mailbox on ``loop``, with what handles messages.

    Without ``access`` it belongs to this host's system, and has all else by environment.
    """
    if access is None or not access.gates:
        admin = admin_of_port(admin_port)
        environ = os.environ if access is None else access.environ
        mailbox = Mailbox(loop, drawn_for(admin), ActorAddress(admin), environ)
    else:
        # Replicas answer the asking process directly, so it has a gate of its own, at a port of
        # its own.
        admin = parse_address(access.gates[0])
        host = host_towards(admin)
        gate = None if host == LOOPBACK else tcp_listener(host, 0)
        own = drawn_address(host, 0 if gate is None else gate.getsockname()[1])
        mailbox = Mailbox(loop, own, ActorAddress(admin), access.environ, gate)
    mailbox.inbox.handle_ours = take
    mailbox.inbox.handle = lambda envelope: take(envelope.message, envelope.sender)
    return mailbox
