"""The actor that the tests of whole systems use, and what they ask of it."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

from thespian.actors import (
    Actor,
    ActorSystemMessage,
    ChildActorExited,
    DeadEnvelope,
    PoisonMessage,
    WakeupMessage,
    requireCapability,
)

ASK_S = 30


class Worker(Actor):
    """Does as the first word of a message says."""

    def __init__(self):
        self.children, self.exits, self.dead = [], [], []
        self.noted = []

    @staticmethod
    def actorSystemCapabilityCheck(capabilities, requirements):
        wanted = (requirements or {}).items()
        return all(capabilities.get(name) == value for name, value in wanted)

    def receiveMessage(self, message, sender):
        if isinstance(message, ChildActorExited):
            self.exits.append(message.childAddress)
        elif isinstance(message, DeadEnvelope):
            self.dead.append(message.deadMessage)
        elif isinstance(message, WakeupMessage):
            self.send(message.payload, "woken")
        elif not isinstance(message, ActorSystemMessage | PoisonMessage):
            word, *arguments = message
            answer = getattr(self, f"do_{word}")(*arguments, sender=sender)
            if answer is not None:
                self.send(sender, answer)

    def do_pid(self, sender):
        return os.getpid()

    def do_warn(self, text, sender):
        logging.getLogger("worker").warning(text)

    def do_echo(self, value, sender):
        return (value,)

    def do_create(self, requirements=None, *, sender):
        self.children.append(self.createActor(Worker, requirements))
        self.send(self.children[-1], ("report_to", sender))

    def do_report_to(self, asker, sender):
        self.send(asker, (self.myAddress, os.getpid()))

    def do_exits(self, sender):
        return len(self.exits), all(each in self.children for each in self.exits)

    def do_wake(self, seconds, sender):
        self.wakeupAfter(timedelta(seconds=seconds), sender)

    def do_collect_dead(self, sender):
        self.handleDeadLetters(True)
        return True

    def do_dead(self, sender):
        return (self.dead,)

    def do_tell(self, target, message, sender):
        self.send(target, message)

    def do_take_long(self, number, seconds, body, sender):
        time.sleep(seconds)
        return number, time.monotonic()

    def do_sleep(self, seconds, sender):
        time.sleep(seconds)

    def do_note(self, number, body, sender):
        self.noted.append(number)

    def do_noted(self, sender):
        """Answer how many were noted, and whether each came once and in order."""
        return len(self.noted), self.noted == list(range(len(self.noted)))

    def do_flood(self, target, first, last, size, sender):
        for number in range(first, last):
            self.send(target, ("note", number, bytes(size)))

    def do_memory(self, sender):
        """Answer what is in memory now, and the most there was."""
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))

    def do_forbid_governor(self, sender):
        self._myRef._governer = None
        return True


@requireCapability("is the other")
class WorksOnTheOther(Worker):
    """Only on systems that have the capability."""


class FailsOnce(Actor):
    """Its handler fails as the message says."""

    def __init__(self):
        self.runs = 0

    def receiveMessage(self, message, sender):
        if message == "runs":
            self.send(sender, self.runs)
        elif not isinstance(message, ActorSystemMessage):
            self.runs += 1
            if message == "fail always" or self.runs == 1:
                raise ValueError("as told")
            self.send(sender, f"run {self.runs}")


def new_child(system, worker):
    return system.ask(worker, ("create",), ASK_S)


def admin_of(system, worker) -> int:
    """Return the admin's pid: the parent of an actor that was made from outside."""
    return parent_of(system.ask(worker, ("pid",), ASK_S))


def parent_of(pid) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])
