"""The HTTP front's processes: ``python -m greenroom.http_front.server``.

A gunicorn master and its workers, with the settings of the environment. The host process starts it,
sends its stderr to logs/front.log, and may keep the listening socket itself and pass it on as the
file descriptor GREENROOM_FRONT_FD: connections then wait in it while the front is restarted.

SIGTERM drains: requests in flight are finished, for as long as actors/runtime/draining.py says. A
dead worker is replaced at once. Exit codes: 0, 1 (failed), 2 (bad settings), 3 and 4 (gunicorn: a
worker could not start).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.workers.base import Worker

from greenroom.actors.runtime import draining
from greenroom.actors.runtime.actor import keep_freed_memory
from greenroom.actors.runtime.http_port import lend
from greenroom.actors.runtime.liveness import Pulse
from greenroom.actors.runtime.logs import LineFormatter
from greenroom.actors.runtime.processes import blocked, raise_limit
from greenroom.actors.runtime.records import FRONT_ROLE, WORKER_ROLE, show_title
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.errors import InvalidRequestError
from greenroom.http_front.app import Front
from greenroom.http_front.link import Link

FD_VARIABLE = "GREENROOM_FRONT_FD"
WORKERS_MARGIN_S = 2  # in which they stop the link and flush the log
DRAIN_MARGIN_S = 10

MakeLink = Callable[[HostSettings], Link]


def gunicorn_settings(settings: HostSettings, fd: int | None) -> dict[str, Any]:
    """Return gunicorn's settings for ours; ``fd`` is a listening socket to use, if any."""
    http = settings.http
    host = f"[{http.host}]" if ":" in http.host else http.host
    return {
        "bind": f"{host}:{http.port}" if fd is None else f"fd://{fd}",
        "workers": http.workers,
        "worker_class": "greenroom.http_front.worker.FrontWorker",
        "control_socket_disable": True,
        "loglevel": "warning",
        "certfile": http.ssl_certfile,
        "keyfile": http.ssl_keyfile,
        "pre_fork": lambda _server, _worker: show_title(FRONT_ROLE),
        "post_worker_init": _begin_worker,
    }


class FrontArbiter(Arbiter):  # type: ignore[misc]  # gunicorn ships no types
    """The master; it has no message loop, so each pass of its own, one a second, is a beat."""

    def __init__(self, app: BaseApplication, settings: HostSettings) -> None:
        super().__init__(app)
        self._settings = settings
        self._pulse = Pulse()

    def manage_workers(self) -> None:
        """Have as many workers as there should be."""
        self._pulse.beat()
        super().manage_workers()

    def spawn_worker(self) -> Any:
        """Start a worker. Signals to it wait until it has handlers of its own, not this one's."""
        with blocked(Worker.SIGNALS):
            return super().spawn_worker()

    def stop(self, graceful: bool = True) -> None:
        """Wait for the workers to drain."""
        limit_s = math.ceil(draining.drain_s(self._settings)) + WORKERS_MARGIN_S
        self.cfg.set("graceful_timeout", limit_s)
        with self._pulse.patience(limit_s + DRAIN_MARGIN_S):
            super().stop(graceful)

    def halt(self, reason: str | None = None, exit_status: int = 0) -> None:
        """End; what has kept a worker from starting comes last, for those who wait for us."""
        try:
            super().halt(reason, exit_status)
        finally:
            self.app.problems.seek(0)
            sys.stderr.write(self.app.problems.read())


def _begin_worker(worker: Any) -> None:
    for listener in worker.sockets:
        lend(listener.sock, worker.loop)
    show_title(WORKER_ROLE)  # last: it means that the worker is ready


class FrontServer(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """gunicorn with our settings; each worker makes its own application and link."""

    def __init__(self, settings: HostSettings, fd: int | None, make_link: MakeLink) -> None:
        self._settings = settings
        self._fd = fd
        self._make_link = make_link
        self.problems = os.fdopen(os.memfd_create("problems"), "w+")  # of workers, for the master
        super().__init__()

    def load_config(self) -> None:
        """Set gunicorn's settings (it calls this; no file or environment of its own is read)."""
        for name, value in gunicorn_settings(self._settings, self._fd).items():
            if value is not None:
                self.cfg.set(name, value)

    def run(self) -> None:
        """Be the master; exits the process."""
        try:
            FrontArbiter(self, self._settings).run()
        except RuntimeError as error:  # as gunicorn's own does
            print(f"\nError: {error}\n", file=sys.stderr)  # noqa: T201
            sys.exit(1)

    def load(self) -> Front:
        """Make one worker's application; gunicorn calls it in the worker, and ends if it cannot."""
        try:
            return Front(self._settings, self._make_link(self._settings))
        except InvalidRequestError as error:
            print(*str(error).split(), file=self.problems, flush=True)
            sys.exit(Arbiter.APP_LOAD_ERROR)


def inherited_fd(environ: dict[str, str] | os._Environ[str]) -> int | None:
    """Return the listening socket we were given, None without; raises InvalidRequestError."""
    value = environ.get(FD_VARIABLE)
    if not value:
        return None
    try:
        os.fstat(int(value))
    except (ValueError, OSError) as error:
        raise InvalidRequestError(
            f"{FD_VARIABLE}={value!r}: expected the number of an open listening socket ({error})"
        ) from None
    return int(value)


def run(settings: HostSettings, make_link: MakeLink = Link) -> None:
    """Serve until a signal ends it; exits the process."""
    show_title(FRONT_ROLE)
    if logging.lastResort is not None:  # writes to logs/front.log, by way of stderr
        logging.lastResort.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    keep_freed_memory()
    raise_limit()  # of the workers, too
    server = FrontServer(settings, inherited_fd(os.environ), make_link)
    # What every worker needs is imported before the fork: a new worker then serves within some
    # 20 ms, and shares these pages with the others.
    import_module("greenroom.http_front.worker")
    gc.collect()
    gc.freeze()
    server.run()


def main() -> None:
    """Run the front of this host, as the environment says."""
    try:
        run(read_settings())
    except InvalidRequestError as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
