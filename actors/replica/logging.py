"""User code's logs: where records go, and which query and replica each is about.

One handler writes to the replica's log. ``greenroom.serve`` has it, whose records are our own:
queries that failed, and the access log. The root logger has it where the deployment says how it
wants to log; else it is Python's last resort, for as long as user code adds no handler, so that
``logging.basicConfig`` works as anywhere. Handlers that user code adds are its own;
:class:`ContextFilter` makes records say there, too, what they are about.
A log that cannot be written must not stop the serving, so records are dropped then.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.actors.messages.queries import Query
from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.modules import users_traceback
from greenroom.actors.runtime import tracing
from greenroom.actors.runtime.logs import LineFormatter, one_line, replica_log
from greenroom.actors.runtime.state_dir import open_private
from greenroom.core.config import LoggingConfig

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # takes no parameter before Python 3.11

OURS = "greenroom.serve"
_PYTHONS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
CANCELLED = 499

_logs_queries = False


def _context() -> dict[str, Any]:
    """Return what is known here and now of the running query and its replica."""
    query, replica = user_context.request_context(), user_context.replica_context()
    trace_id, span_id = ("", "") if tracing.active is None else tracing.active.ids()
    return {
        "request_id": query.request_id,
        "route": query.route,
        "endpoint": query.endpoint,
        "application": replica.app_name if replica else "",
        "deployment": replica.deployment if replica else "",
        "backend": replica.backend if replica else "",
        "version": (replica.version if replica else None) or "",
        "replica": replica.replica_tag if replica else "",
        "multiplexed_model_id": query.multiplexed_model_id,
        "remaining_s": None if query.remaining_s is None else round(query.remaining_s, 3),
        "is_shadow": query.is_shadow,
        "trace_id": trace_id,
        "span_id": span_id,
    }


CONTEXT = tuple(_context())  # the names


class ContextFilter(logging.Filter):
    """Gives each record, where it has none, ``request_id`` and the other names in CONTEXT.

    It drops no record. For handlers of your own: ``handler.addFilter(ContextFilter())``; then a
    format may have ``%(request_id)s``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add what is known here and now."""
        for name, value in _context().items():
            record.__dict__.setdefault(name, value)
        return True


class _UsersTracebacks(logging.Formatter):
    """Leaves our own frames out of tracebacks, unless the level is DEBUG."""

    def formatException(self, ei: Any) -> str:
        """Return the traceback of an exception as text."""
        if ei[1] is None or logging.getLogger(OURS).isEnabledFor(logging.DEBUG):
            return super().formatException(ei)
        return users_traceback(ei[1]).rstrip("\n")


class TextFormatter(_UsersTracebacks, LineFormatter):
    """``INFO 2026-01-31 12:00:00,000 replica request-id -- message``."""

    def __init__(self, attributes: tuple[str, ...]) -> None:
        more = "".join(f" {name}=%({name})s" for name in attributes)
        super().__init__(
            f"%(levelname)s %(asctime)s %(replica)s %(shown_id)s{more} -- %(message)s",
            defaults=dict.fromkeys(attributes, ""),  # taskName is not in Python 3.11
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Show a dash where there is no request."""
        trace_id = getattr(record, "trace_id", "")
        trace = f" trace_id={trace_id}" if trace_id else ""
        record.shown_id = (getattr(record, "request_id", "") or "-") + trace
        return super().formatMessage(record)


class JsonFormatter(_UsersTracebacks):
    """One object per line: time, level, logger, message, CONTEXT, and what ``extra`` added."""

    def __init__(self, attributes: tuple[str, ...]) -> None:
        super().__init__()
        self._attributes = attributes

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line; what is empty is left out."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = record.__dict__
        line |= {name: fields.get(name) for name in CONTEXT}
        line |= {name: fields.get(name) for name in self._attributes}
        line |= {name: fields[name] for name in fields if name not in _PYTHONS and name not in line}
        for name in [each for each in CONTEXT if _is_empty(line[each])]:
            del line[name]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return _json(line)


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value == ""


def _json(line: dict[str, Any]) -> str:
    try:
        return json.dumps(line, default=repr)
    except (TypeError, ValueError, RecursionError):  # odd keys, or a value within itself
        return json.dumps({name: repr(value) for name, value in line.items()})


class ReplicaHandler(_StreamHandler):
    """Writes to a file of this process's own, whatever user code does to sys.stderr.

    It is kept when the settings change, with another file: any thread may be on its way to it.
    """

    def __init__(self) -> None:
        super().__init__(io.StringIO())  # until it has a file
        self.addFilter(ContextFilter())

    def write_to(self, descriptor: int, formatter: logging.Formatter) -> None:
        """Write to this file from now on, and close the one before."""
        how: Any = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
        stream = os.fdopen(descriptor, "a", **how)
        assert self.lock is not None
        with self.lock:
            before, self.stream, self.formatter = self.stream, stream, formatter
        with contextlib.suppress(OSError):
            before.close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Report on stderr what was wrong with the record, unless that fails too."""
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stderr
            super().handleError(record)


_handler = ReplicaHandler()


def our_logger() -> logging.Logger:
    """Return the logger of our own records, also where user code has silenced all that there are.

    ``logging.config.dictConfig`` does that unless it is told otherwise.
    """
    logger = logging.getLogger(OURS)
    logger.disabled = False
    return logger


def configure(values: Mapping[str, Any] | None, tag: str) -> None:
    """Log as a replica's ``logging_config`` says, again at each change; OSError for its logs_dir.

    Without one, records of level INFO are lines of text, and queries that went well are not logged.
    """
    global _logs_queries  # noqa: PLW0603  # one per process, as the loggers are
    config = (
        LoggingConfig(enable_access_log=False) if values is None else LoggingConfig.read(values)
    )
    attributes = config.additional_log_standard_attrs
    is_json = config.encoding == "JSON"
    formatter = JsonFormatter(attributes) if is_json else TextFormatter(attributes)
    _handler.write_to(_open(config.logs_dir, tag), formatter)
    ours = our_logger()
    for logger in (logging.root, ours):
        logger.setLevel(config.level)
    ours.propagate = False
    ours.addHandler(_handler)
    logging.lastResort = _handler
    if values is None:
        logging.root.removeHandler(_handler)
    else:
        logging.root.addHandler(_handler)
    _logs_queries = config.enable_access_log


def _open(logs_dir: str | None, tag: str) -> int:
    if logs_dir is None:
        return os.dup(2)
    Path(logs_dir).mkdir(parents=True, exist_ok=True)
    return open_private(Path(logs_dir) / f"{replica_log(tag)}.log")


def logs_queries() -> bool:
    """Return whether queries are to be logged when they have ended."""
    return _logs_queries


def log_query(query: Query, status: int, duration_s: float) -> None:
    """Log a query that has ended; ``status`` 0 is one that was cancelled."""
    method = query.http_method or "CALL"
    what = query.path if query.http_method else query.call_method or "__call__"
    status = status or CANCELLED
    duration_ms = round(duration_s * 1000, 3)
    our_logger().info(
        "%s %s %s %.1fms",
        method,
        one_line(what),
        status,
        duration_ms,
        extra={"method": method, "path": what, "status": status, "duration_ms": duration_ms},
    )


def log_failure(query: Query, error: BaseException) -> None:
    """Log what user code raised on a query."""
    our_logger().error("request %s failed", query.request_id, exc_info=error)
