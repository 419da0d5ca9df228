"""One process's messages, over its links: what our own code sends, receives and watches by.

Theory of operation. A mailbox belongs to an asyncio loop. What arrives waits in it until the loop
gives it to :attr:`Mailbox.handle`, and waits on while that is None. What is sent is *unfinished*
until its outcome is known: that of a :class:`Delivery` of our own code, or of an intent of
Thespian's, which has the same ``targetAddr`` and ``tx_done``.

An actor's mailbox is in the hands of Thespian (thespian_base.py). A process that is no actor, such
as a worker of the HTTP front or a script, *attaches* one to a loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import LogRecord
from time import monotonic
from typing import Any

from thespian.actors import ActorAddress
from thespian.system.messages.multiproc import EndpointConnected
from thespian.system.transport import SendStatus

from greenroom.actors.transport import descriptors, envelopes
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
from greenroom.actors.transport.envelopes import Envelope, decode, encode
from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.links import Links, Peer
from greenroom.actors.transport.session import Unsent
from greenroom.actors.transport.sockets import tcp_listener
from greenroom.core.formats import OURS

logger = logging.getLogger(__name__)

Callback = Callable[[], None]
OnGone = Callable[[bool], None]  # gets whether the process is certainly dead


class Delivery:
    """A message of our own code on its way: what Thespian's TransmitIntent is, at a tenth of it.

    It has no time limit: it ends when it is acknowledged, or with its target.
    """

    __slots__ = ("kind", "on_failed", "on_sent", "targetAddr")

    def __init__(
        self,
        target: Any,
        kind: type,
        on_sent: Callback | None,
        on_failed: Callback | None,
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
    """Envelopes in the order of their arrival."""

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
        self.inbox = Inbox()
        self.handle: Callable[[Envelope], object] | None = None
        self.unfinished: dict[Any, None] = {}  # copied to be iterated: threads add to it
        self.on_finished: Callback | None = None
        # The same for our own messages, with their sender, past Thespian.
        self.handle_ours: Callable[[Any, Any], object] | None = None
        self.on_error: Callable[[Exception, object], None] = _log
        # Takes what ``send`` is given for an address that only Thespian knows.
        self.forward: Callable[[Any, Any, Callback | None, Callback | None], None] = self._forget
        self._own = own
        self._pid = os.getpid()
        self._delivery_is_due = False  # or under way
        self._is_closed = False
        self._watching: dict[str, list[OnGone]] = {}  # by the address's text
        try:
            self.links = Links(loop, own, self, keys_of(own, environ), gate)
        except (OSError, ClusterKeyError):
            if gate is not None:
                gate.close()
            raise
        self.at_turn_end = self.links.at_turn_end
        descriptors.release_in_children(self)

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        return [] if self._is_closed else self.links.descriptors()

    def close(self) -> None:
        """Fail what is unfinished, and let go of everything."""
        if not self._is_closed:
            self.handle = self.handle_ours = None
            for tag in list(self.unfinished):
                self.finish(tag, SendStatus.Failed)
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
        if type(target.addressDetails) is not ProcessAddress:
            self.forward(target, message, on_sent, on_failed)
        else:
            self._deliver(target, message, encode(message), on_sent, on_failed)

    def send_loosely(self, target: Any, message: Any) -> None:
        """Send what nobody asks the outcome of: at once, where that is possible."""
        address = target.addressDetails
        if type(address) is not ProcessAddress:
            self.forward(target, message, None, None)
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
            self.loop.call_soon(self.finish, tag, SendStatus.DeadTarget)
        elif address.text == self._own.text:
            self.loop.call_soon(self._to_self, tag, message)
        else:
            self.links.send(address, buffers, tag, delays_ack=delays_ack)

    def write(self, target: Any) -> None:
        """Write what was sent to ``target`` now; on the loop's thread only."""
        self.links.write(target.addressDetails)

    def finish(self, tag: Any, status: Any) -> None:
        """End what is unfinished."""
        if tag in self.unfinished:
            del self.unfinished[tag]
            tag.tx_done(status)
            if self.on_finished is not None:
                self.on_finished()

    def finish_sent_to(self, target: Any) -> None:
        """End all that was sent to a process that is dead."""
        for tag in [each for each in list(self.unfinished) if each.targetAddr == target]:
            self.finish(tag, SendStatus.DeadTarget)

    def _to_self(self, tag: Any, message: Any) -> None:
        self.inbox.append(Envelope(tag.targetAddr, message))
        self.finish(tag, SendStatus.Sent)
        self.deliver()

    def _forget(
        self, _target: Any, message: Any, _on_sent: Callback | None, on_failed: Callback | None
    ) -> None:
        logger.error("a %s has an address that is not known here", type(message).__name__)
        if on_failed is not None:
            self.loop.call_soon(on_failed)

    # --- What the links report: a Shell -------------------------------------------------------

    def received(self, sender: Peer, buffers: list[Buffer]) -> None:
        """See :class:`~greenroom.actors.transport.links.Shell`."""
        address = sender.sender or _known(sender)
        try:
            message = decode(buffers, is_exact=sender.has_our_format)
        except Exception:
            logger.exception("cannot read a message of %s; it is sent back", sender.address)
            self.links.send(sender.address, envelopes.sent_back(buffers), tag=None)
            return
        if type(message) is envelopes.Unreadable:
            message = envelopes.poison_from(message)
            if message is None:
                return
        envelope = Envelope(address, message, sum(map(len, buffers)))
        if type(message) is EndpointConnected:
            self.inbox.appendleft(envelope)  # what was sent to the child waits for its address
        else:
            self.inbox.append(envelope)

    def take(self, sender: Peer, body: bytes) -> bool:
        """See Shell."""
        if self.handle is None or self.handle_ours is None or self.inbox:
            return False
        try:
            message = decode([body], is_exact=sender.has_our_format)
        except Exception:  # ``received`` says so to its sender
            return False
        if type(message) not in OURS:
            return False
        self.handle_ours(message, sender.sender or _known(sender))
        return True

    def arrive(self, message: Any) -> None:
        """Take what this process sends itself."""
        self.inbox.append(Envelope(self.address, message))
        self.deliver()

    def deliver(self) -> None:
        """Hand over what has arrived, in slices; see Shell and :class:`Inbox`."""
        if self._delivery_is_due or not self.inbox:
            return
        self._delivery_is_due = True  # what a handler does begins no other one
        try:
            if self.handle is not None:
                for envelope in self.inbox.take_slice():
                    if self.handle_ours is not None and type(envelope.message) in OURS:
                        self.handle_ours(envelope.message, envelope.sender)
                    else:
                        self.handle(envelope)
                    if self.handle is None:
                        break
        finally:
            self._delivery_is_due = bool(self.inbox) and self.handle is not None
            if self._delivery_is_due:
                self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._delivery_is_due = False
        self.deliver()

    def sent(self, tags: Sequence[object]) -> None:
        """See Shell."""
        for tag in tags:
            self.finish(tag, SendStatus.Sent)

    def undeliverable(self, messages: Sequence[Unsent]) -> None:
        """See Shell."""
        for message in messages:
            self.finish(message.tag, SendStatus.DeadTarget)

    def callback_failed(self, error: Exception, callback: object) -> None:
        """See Shell."""
        self.on_error(error, callback)

    def refused(self, tag: object, reason: str) -> None:
        """See Shell."""
        if not isinstance(getattr(tag, "message", None), LogRecord):  # it would log without end
            logger.error("a message was not sent: %s", reason)
        self.loop.call_soon(self.finish, tag, SendStatus.Failed)

    def peer_down(self, address: ProcessAddress, *, is_certain: bool) -> None:
        """See Shell."""
        self._notify_watchers(address, is_certain=is_certain)

    def peer_reset(self, address: ProcessAddress) -> None:
        """See Shell; what the other end could not send is lost, as if it had not been reached."""
        self._notify_watchers(address, is_certain=False)

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
        return self.links.beat_link(target.addressDetails, on_answer)

    def answer_beats(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer the beats of other processes so from now on."""
        self.links.answer_beats(answer)

    def try_host(self, gate: Any) -> None:
        """See whether another host still answers, on every connection with it."""
        self.links.try_host(gate.addressDetails)

    def trouble_with(self, gate: Any) -> Trouble:
        """Return why the host of an address could not be reached the last time."""
        return self.links.trouble_with(gate.addressDetails)

    def _notify_watchers(self, address: ProcessAddress, *, is_certain: bool) -> None:
        for on_gone in list(self._watching.get(address.text, ())):
            self.loop.call_soon(on_gone, is_certain)


def _known(peer: Peer) -> Any:
    """Return a peer's address, as its messages have it."""
    peer.sender = ActorAddress(peer.address)
    return peer.sender


def _log(error: Exception, what: object) -> None:
    logger.error("%r failed", what, exc_info=error)


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
    mailbox.handle_ours = take
    mailbox.handle = lambda envelope: take(envelope.message, envelope.sender)
    return mailbox
