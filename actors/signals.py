"""Signals as native code and forked processes expect them, where Thespian handles them all.

It has a handler in Python for each signal of an actor, which only notes that there was one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def be_as_usual() -> None:
    """Have this process end at its first fault, and what it forks by each signal that ends."""
    _die_of_faults()
    os.register_at_fork(before=_block, after_in_child=_be_nobodys_actor, after_in_parent=_unblock)


def _die_of_faults() -> None:
    """End this process at its first fault, after the tracebacks of its threads, on stderr.

    Else the same instruction would run again, and fault again, for ever; nobody would learn that
    the actor is gone.
    """
    for fault in FAULTS:
        signal.signal(fault, signal.SIG_DFL)
    faulthandler.enable(2)  # whatever becomes of sys.stderr


_before = threading.local()  # the signals that were blocked before the thread's fork


def _block() -> None:
    """Have signals to the child wait until it has dropped the handlers; they would be lost."""
    _before.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.blocked)


def _be_nobodys_actor() -> None:
    """Drop Thespian's handlers: ``multiprocessing`` ends its workers by SIGTERM, and waits."""
    for number in signal.valid_signals():
        module = getattr(signal.getsignal(number), "__module__", None) or ""
        if module.startswith("thespian."):
            signal.signal(number, signal.SIG_DFL)
    _unblock()
