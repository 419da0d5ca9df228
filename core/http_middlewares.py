"""The settings of what stands around every HTTP request: ASGI middlewares, and CORS.

They travel between processes by environment, so they are plain values: a middleware is named by its
import path, and its options are JSON-able. Whether it can be imported is for the front to find out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from greenroom.core.validation import Settings

_is_path = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*").fullmatch

_is_origin = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+").fullmatch

ANYTHING = ("*",)


class MiddlewareOptions(Settings):
    """One middleware: called with the app inside it and ``options``, once in each HTTP worker."""

    path: str
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("path")
    @classmethod
    def _is_import_path(cls, path: str) -> str:
        if not _is_path(path):
            raise ValueError(
                "expected an import path MODULE:NAME, as starlette.middleware.gzip:GZipMiddleware"
            )
        if path.startswith("__main__:"):
            raise ValueError("other processes cannot import it from a script; put it in a module")
        return path

    @field_validator("options")
    @classmethod
    def _is_jsonable(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"must be JSON-able, for they go to other processes: {error}"
            ) from None
        return options


class CorsOptions(Settings):
    """What browsers may let pages of other origins do; names and defaults are Starlette's."""

    allow_origins: tuple[str, ...] = ()
    allow_origin_regex: str | None = None
    allow_methods: tuple[str, ...] = ("GET",)
    allow_headers: tuple[str, ...] = ()
    allow_credentials: bool = False
    expose_headers: tuple[str, ...] = ()
    max_age: int = Field(default=600, ge=0, description="seconds")

    @field_validator("allow_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _is_origin(origin):
                raise ValueError(
                    f"{origin!r} is no origin as browsers name it: https://shop.example, in lower "
                    "case and without a path, or with a :port"
                )
        return origins

    @field_validator("allow_origin_regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _allows_somebody(self) -> Self:
        if not (self.allow_origins or self.allow_origin_regex):
            raise ValueError("cors allows no origin: give allow_origins or allow_origin_regex")
        return self


def read_middlewares(value: Any) -> Any:
    """Return ``value`` as a list of dicts, as far as its form is one of those that are known.

    A list of import paths, pairs of a path and its options, dicts with ``path`` and ``options``, or
    Starlette's Middleware objects; or a string: JSON of such a list, or paths with commas between.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = _json(value) if value[:1] in {"[", "{"} else _words(value)
    if not isinstance(value, Sequence):
        return value
    return [_middleware(each) for each in value]


def read_cors(value: Any) -> Any:
    """Return ``value`` as a dict, or None for none.

    True and ``*`` let pages of every origin do everything, a list of origins (a string: with
    commas between) those, and a dict (a string: as JSON) is CorsOptions.
    """
    if isinstance(value, str):
        value = _json(value) if value[:1] in {"[", "{"} else _WORDS.get(value.lower(), value)
    if isinstance(value, str):
        value = _words(value)
    if value is None or value is False:
        return None
    origins = ANYTHING if value is True else value
    if isinstance(origins, list | tuple | set):
        every = {"allow_methods": ANYTHING, "allow_headers": ANYTHING}
        return {"allow_origins": list(origins), **every}
    return value


_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None


def _middleware(value: Any) -> Any:
    if isinstance(value, str):
        return {"path": value}
    if isinstance(value, tuple | list) and len(value) == 2:
        return {"path": value[0], "options": value[1]}
    cls = getattr(value, "cls", None)
    if cls is not None and not isinstance(value, Mapping):  # starlette.middleware.Middleware
        if getattr(value, "args", ()):
            raise ValueError(f"{cls.__qualname__}: give its options by name")
        return {"path": f"{cls.__module__}:{cls.__qualname__}", "options": dict(value.kwargs)}
    return value
