"""The settings of what a replica logs, under the names Ray Serve's users know."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from greenroom.core.validation import Settings

LEVELS = {"CRITICAL": 50, "ERROR": 40, "WARNING": 30, "INFO": 20, "DEBUG": 10, "NOTSET": 0}

# What Python's log records have anyway, and a line can be asked to show.
STANDARD_ATTRIBUTES = frozenset(
    {
        "created",
        "filename",
        "funcName",
        "levelno",
        "lineno",
        "module",
        "msecs",
        "name",
        "pathname",
        "process",
        "processName",
        "relativeCreated",
        "taskName",
        "thread",
        "threadName",
    }
)


class LoggingConfig(Settings):
    """How a deployment's replicas log; all of it can be changed while they serve.

    ``encoding``: lines of text, or of JSON. ``log_level``: a name, or Python's number for it.
    ``logs_dir``: where log records go instead of the state dir's logs; what is printed stays there.
    ``enable_access_log``: whether each query is logged when it has ended.
    """

    encoding: Literal["TEXT", "JSON"] = "TEXT"
    log_level: str | int = "INFO"
    logs_dir: str | None = None
    enable_access_log: bool = True
    additional_log_standard_attrs: tuple[str, ...] = ()

    @field_validator("encoding", mode="before")
    @classmethod
    def _in_capitals(cls, value: Any) -> Any:
        value = getattr(value, "value", value)  # of an enum
        return value.upper() if isinstance(value, str) else value

    @field_validator("log_level")
    @classmethod
    def _is_level(cls, level: str | int) -> str | int:
        if isinstance(level, int):
            if not 0 <= level <= 50:
                raise ValueError("expected a number from 0 to 50")
            return level
        if level.upper() not in LEVELS:
            raise ValueError(f"expected one of {', '.join(LEVELS)}, or a number")
        return level.upper()

    @field_validator("logs_dir")
    @classmethod
    def _is_absolute(cls, folder: str | None) -> str | None:
        if folder is not None and not folder.startswith("/"):
            raise ValueError("must be an absolute path: replicas do not run where you are")
        return folder

    @field_validator("additional_log_standard_attrs")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in STANDARD_ATTRIBUTES]:
            known = ", ".join(sorted(STANDARD_ATTRIBUTES))
            raise ValueError(f"{', '.join(map(repr, unknown))}: expected some of {known}")
        return names

    @property
    def level(self) -> int:
        """Python's number for ``log_level``."""
        return self.log_level if isinstance(self.log_level, int) else LEVELS[self.log_level]
