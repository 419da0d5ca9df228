"""From an answer that came in to the value or exception that the caller of a handle gets."""

from __future__ import annotations

import pickle
import sys
from typing import Any, NamedTuple

from greenroom.actors.messages import Answer, FailedAnswer, ValueAnswer
from greenroom.actors.value_streams import ValueStream
from greenroom.core.errors import (
    GreenroomError,
    MethodNotAllowedError,
    UserCodeError,
    error_from,
)


class Outcome(NamedTuple):
    """How a call ended: with a value, or with an exception to raise."""

    value: Any = None
    error: BaseException | None = None


class RemoteTraceback(Exception):  # noqa: N818  # shown as a cause, never caught
    """Carries a traceback of another process as its text, for Python 3.10, which shows no notes."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def decode(answer: Answer | ValueStream, what: str) -> Outcome:
    """Unpickle an answer of ``what``; runs user code, so never on a message loop."""
    if isinstance(answer, FailedAnswer):
        return Outcome(error=_error_of(answer, what))
    if not isinstance(answer, ValueAnswer):
        return Outcome(error=GreenroomError(f"{what} answered a call with no value"))
    try:
        return Outcome(pickle.loads(answer.value))
    except Exception as error:  # the user's types may refuse in any way
        text = f"the result of {what} cannot be unpickled here: {type(error).__name__}: {error}"
        failed = UserCodeError(text)
        failed.__cause__ = error
        return Outcome(error=failed)


def with_note(error: BaseException, note: str) -> BaseException:
    """Add a note to the exception, to be shown below its traceback (above it, on Python 3.10)."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]  # from 3.11
        error.__cause__ = RemoteTraceback(note)
    return error


def _error_of(answer: FailedAnswer, what: str) -> BaseException:
    error = _original(answer) or _described(answer)
    if answer.traceback:
        with_note(error, f"in {what}, on its replica:\n{answer.traceback.rstrip()}")
    return error


def _original(answer: FailedAnswer) -> BaseException | None:
    if answer.exception is None:
        return None
    try:
        error = pickle.loads(answer.exception)
    except Exception:  # e.g. a constructor that takes more than its args; the text must do
        return None
    return error if isinstance(error, Exception) else None


def _described(answer: FailedAnswer) -> GreenroomError:
    error = error_from(answer.kind, answer.text)
    if answer.retry_after_s is not None:
        error.retry_after_s = answer.retry_after_s
    if isinstance(error, MethodNotAllowedError):
        error.allowed = answer.allowed
    return error
