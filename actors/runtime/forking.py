"""Child processes, which begin with a function of ours: ``launch`` starts them.

A child that is forked shares this process's imported modules, because importing takes most of a
start. It inherits nothing else: no descriptors, no handlers of signals and logs, no main module. It
never returns into the code that forked it. Only a process without other threads may fork like this,
because locks that other threads hold would stay locked. Any other one spawns a program.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

PROGRAM = """
import sys
from greenroom.actors.runtime.forking import run
sys.exit(run(*sys.argv[1:]))
"""
# The fork makes it a child of init: it may outlive the caller, and is never its zombie.
_DETACHED = f"import os\nif os.fork(): os._exit(0)\n{PROGRAM}"
_MARKS = "greenroom.actors.runtime.records"
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def can_fork() -> bool:
    """Return whether this process has no other threads."""
    return threading.active_count() == 1


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection: imports make none, and looking takes a sixth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def share_memory() -> None:
    """Keep present objects out of garbage collection, here and in processes forked from here.

    A collection writes to every object that it looks at, and so would copy their shared memory.
    """
    gc.freeze()


def run(entry: str, *arguments: str) -> Any:
    """Import the function that ``entry`` names, as module:function, and return what it returns."""
    module, _, name = entry.partition(":")
    with uncollected():
        import_module(_MARKS)  # first: gunicorn would hide what the process is marked with
        function = getattr(import_module(module), name)
    return function(*arguments)


def launch(
    entry: str,
    *,
    output: int,
    keep: Collection[int] = (),
    environ: Mapping[str, str],
    by_fork: bool,
    detached: bool = False,
) -> int:
    """Have a child process :func:`run` this, with more variables; the rest is as in :func:`fork`.

    ``by_fork`` is the caller's choice, where :func:`can_fork` says that it may.
    """
    if by_fork:

        def main() -> Any:
            os.environ.update(environ)
            return run(entry)

        return fork(main, output, keep=keep, detached=detached)
    env = {**os.environ, **environ}
    if not detached:
        return spawn(entry, output=output, keep=keep, env=env).pid
    apart: Any = {"program": _DETACHED, "cwd": "/", "start_new_session": True}
    child = spawn(entry, output=output, keep=keep, env=env, **apart)
    child.wait()  # it has forked by then
    return child.pid


def fork(
    main: Callable[[], int | None],
    output: int,
    *,
    keep: Collection[int],
    detached: bool = False,
    is_brief: bool = False,
) -> int:
    """Run ``main`` in a child, which ends with it; return the child's pid, not for ``detached``.

    The child writes to the descriptor ``output`` and reads nothing; of the others it has those of
    ``keep``. With ``detached`` it is a child of init, in a session of its own. ``is_brief`` for one
    of many that end soon: what is garbage here by then is still collected here.
    """
    if not is_brief:
        share_memory()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk
            stream.flush()  # or the child would write it once more
    pid = os.fork()
    if pid == 0:
        _be_child(main, output, keep, detached=detached)
    if detached:
        os.waitpid(pid, 0)
    return pid


def spawn(
    entry: str,
    *arguments: str,
    output: int,
    keep: Collection[int] = (),
    program: str = PROGRAM,
    **more: Any,
) -> subprocess.Popen[bytes]:
    """Start a program that is to :func:`run` this, as in :func:`fork`; ``more`` is Popen's."""
    return subprocess.Popen(
        [sys.executable, "-c", program, entry, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=tuple(keep),
        **more,
    )


def _be_child(
    main: Callable[[], int | None], output: int, keep: Collection[int], *, detached: bool
) -> None:
    status = 1
    try:
        if detached:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.chdir("/")
        _leave_behind(output, keep)
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _leave_behind(output: int, keep: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)  # an event loop's
    for handled in _HANDLED:
        signal.signal(handled, signal.SIG_DFL)
    from greenroom.actors.runtime.logs import log_to_stderr  # noqa: PLC0415  # see uncollected()

    log_to_stderr()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # By name, for some may have been opened under a higher limit than there is now.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)
    # As in ``python -c``. What user code starts by multiprocessing would else begin with our main.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c"]
    if not getattr(sys.flags, "safe_path", False):  # since 3.11
        sys.path[0] = ""
