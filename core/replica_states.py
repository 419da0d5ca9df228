"""The life of a replica, as a table.

    should_start --START--> starting --STARTED--> running --RETIRE--> should_stop --STOP--> stopping
         |                     |  `--FAILED / RETIRE--------------------^                      |
         `--RETIRE--> stopped <+--- EXITED, from every state in which there may be a process --+

    starting, running --LOSE--> lost --FIND--> starting

*should_start* is decided and saved, but nothing was done yet; *should_stop* still has its process,
which finishes what it has once no router sends it more. *lost* is what may live on a host that
cannot be reached. Nothing leaves *stopped*.
"""

from __future__ import annotations

from enum import Enum


class ReplicaState(str, Enum):
    """Where a replica is in its life."""

    SHOULD_START = "SHOULD_START"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SHOULD_STOP = "SHOULD_STOP"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    LOST = "LOST"


class ReplicaEvent(str, Enum):
    """What can happen to a replica."""

    START = "START"  # its process is being made and told to start
    STARTED = "STARTED"  # its constructor returned
    FAILED = "FAILED"  # its constructor raised
    RETIRE = "RETIRE"  # it is no longer wanted
    STOP = "STOP"  # it has been told to stop
    EXITED = "EXITED"  # its process is gone
    LOSE = "LOSE"  # its host is lost
    FIND = "FIND"  # its host is back, and says that its process is there


S, E = ReplicaState, ReplicaEvent

TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (S.SHOULD_START, E.START): S.STARTING,
    (S.SHOULD_START, E.RETIRE): S.STOPPED,
    (S.STARTING, E.STARTED): S.RUNNING,
    (S.STARTING, E.FAILED): S.SHOULD_STOP,
    (S.STARTING, E.RETIRE): S.SHOULD_STOP,
    (S.STARTING, E.EXITED): S.STOPPED,
    (S.RUNNING, E.RETIRE): S.SHOULD_STOP,
    (S.RUNNING, E.EXITED): S.STOPPED,
    (S.SHOULD_STOP, E.STOP): S.STOPPING,
    (S.SHOULD_STOP, E.EXITED): S.STOPPED,
    (S.STOPPING, E.EXITED): S.STOPPED,
    (S.STARTING, E.LOSE): S.LOST,
    (S.RUNNING, E.LOSE): S.LOST,
    (S.LOST, E.FIND): S.STARTING,
    (S.LOST, E.EXITED): S.STOPPED,
}

LIVE = frozenset({S.SHOULD_START, S.STARTING, S.RUNNING})
LEAVING = frozenset({S.SHOULD_STOP, S.STOPPING})


class IllegalTransitionError(RuntimeError):
    """An event that cannot happen in this state: a bug in the caller."""


def next_state(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Return the state after ``event``; raise IllegalTransitionError naming both otherwise."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"event {event.value} in state {state.value}") from None
