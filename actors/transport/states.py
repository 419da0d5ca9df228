"""The life of a connection and of a session, as tables.

Theory of operation. A *connection* is one byte stream between two processes; a *session* is what
the two processes have sent and still owe each other, and outlives any number of connections.

    connection   greeting --NONCE--> proving --IDENTITY--> welcoming --WELCOME--> open
                     `--IDENTITY (local kind)-----------------^
                 and from every state --REFUSE / CLOSE--> dead

    session      detached --ATTACH--> attached --WELCOME--> open
                    ^                   `-------DETACH-------'   --END--> ended, from every state

In *greeting* each side says hello: protocol version and, on the remote kind, a fresh nonce; on the
local kind its identity, which the kernel has vouched for. In *proving* each side sends its identity
with a proof that it holds the cluster key. From *welcoming* on the peer is authenticated. Both then
say which messages they have received; the connection is *open* and carries messages in order. A
*dead* connection takes bytes without looking at them and never emits anything.

A session takes messages in every state but *ended*; it keeps each until it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class ConnectionState(str, Enum):
    """Where a connection is in its life."""

    GREETING = "GREETING"
    PROVING = "PROVING"
    WELCOMING = "WELCOMING"
    OPEN = "OPEN"
    DEAD = "DEAD"


class ConnectionEvent(str, Enum):
    """What can happen to a connection."""

    NONCE = "NONCE"  # the peer's hello of the remote kind was read
    IDENTITY = "IDENTITY"  # the peer's identity was read, and its proof was right
    WELCOME = "WELCOME"  # the peer said what it has received
    ACKNOWLEDGE = "ACKNOWLEDGE"  # this side wants to say what it has received
    REFUSE = "REFUSE"  # the peer broke the rules
    CLOSE = "CLOSE"  # the stream ended, or this side ends it


class SessionState(str, Enum):
    """Where a session is in its life."""

    DETACHED = "DETACHED"
    ATTACHED = "ATTACHED"
    OPEN = "OPEN"
    ENDED = "ENDED"


class SessionEvent(str, Enum):
    """What can happen to a session."""

    SEND = "SEND"  # the process wants to send a message
    ATTACH = "ATTACH"  # an authenticated connection takes over
    WELCOME = "WELCOME"  # the peer said what it has received
    DETACH = "DETACH"  # its connection is dead
    END = "END"  # the peer is given up, or was replaced by a new incarnation


C, CE = ConnectionState, ConnectionEvent
S, SE = SessionState, SessionEvent

CONNECTION: Mapping[tuple[ConnectionState, ConnectionEvent], ConnectionState] = {
    (C.GREETING, CE.NONCE): C.PROVING,
    (C.GREETING, CE.IDENTITY): C.WELCOMING,
    (C.PROVING, CE.IDENTITY): C.WELCOMING,
    (C.WELCOMING, CE.WELCOME): C.OPEN,
    (C.OPEN, CE.ACKNOWLEDGE): C.OPEN,
    **{(state, CE.REFUSE): C.DEAD for state in C if state is not C.DEAD},
    **{(state, CE.CLOSE): C.DEAD for state in C},  # closing twice is no mistake
}

SESSION: Mapping[tuple[SessionState, SessionEvent], SessionState] = {
    **{(state, SE.SEND): state for state in S if state is not S.ENDED},
    **{(state, SE.ATTACH): S.ATTACHED for state in S if state is not S.ENDED},
    (S.ATTACHED, SE.WELCOME): S.OPEN,
    (S.ATTACHED, SE.DETACH): S.DETACHED,
    (S.OPEN, SE.DETACH): S.DETACHED,
    **{(state, SE.END): S.ENDED for state in S},  # ending twice is no mistake
}


class IllegalEventError(RuntimeError):
    """A call that makes no sense in this state: a bug in the caller."""


AnyState = TypeVar("AnyState", ConnectionState, SessionState)
AnyEvent = TypeVar("AnyEvent", ConnectionEvent, SessionEvent)


def next_state(
    table: Mapping[tuple[AnyState, AnyEvent], AnyState], state: AnyState, event: AnyEvent
) -> AnyState:
    """Return the state after ``event``; raise IllegalEventError naming both otherwise."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalEventError(
            f"{type(event).__name__} {event.value} in state {state.value}"
        ) from None
