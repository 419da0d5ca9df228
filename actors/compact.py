"""The messages of queries as plain tuples: those of which there are thousands a second.

Pickle calls Python for each instance of a class, and looks its class up by name; tuples of plain
values cost it neither (docs/performance.md has the figures). All else is pickled as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from greenroom.actors.messages import (
    AnswerQueries,
    Assignment,
    HttpAnswer,
    Process,
    QueriesFinished,
    Query,
    RunQueries,
    SubmitQueries,
)

Plain = tuple[Any, ...]  # begins with one of these numbers
ITSELF, SUBMIT, RUN, ANSWER, FINISHED = range(5)

_query = partial(tuple.__new__, Query)
_assignment = partial(tuple.__new__, Assignment)
_http_answer = partial(tuple.__new__, HttpAnswer)
_process = partial(tuple.__new__, Process)


def plain(message: Any) -> Any:
    """Return what to pickle for ``message``: a tuple for those of queries, and for tuples."""
    make_plain = _PLAIN.get(type(message))
    return message if make_plain is None else make_plain(message)


def restored(loaded: Any) -> Any:
    """Return what ``plain`` was given; raises whatever a tuple that it did not make leads to."""
    return _RESTORED[loaded[0]](*loaded[1:]) if type(loaded) is tuple else loaded


def _plain_submit(message: SubmitQueries) -> Plain:
    queries = [tuple(query) for query in message.queries]
    return SUBMIT, message.incarnation, queries, message.cancelled, message.resent


def _plain_run(message: RunQueries) -> Plain:
    assignments = [(each[0], tuple(each[1]), *each[2:]) for each in message.assignments]
    proxy, cancelled = tuple(message.proxy), message.cancelled
    return RUN, message.incarnation, proxy, assignments, cancelled, message.compared


def _plain_answer(message: AnswerQueries) -> Plain:
    answers = [tuple(each) if type(each) is HttpAnswer else each for each in message.answers]
    return ANSWER, message.incarnation, answers


def _plain_finished(message: QueriesFinished) -> Plain:
    return FINISHED, *[getattr(message, name) for name in _FINISHED_FIELDS]


def _maker(kind: type) -> Callable[..., Any]:
    """Return what makes a message of the values of its fields, faster than its constructor."""
    setters = [getattr(kind, each.name).__set__ for each in fields(kind)]
    new: Callable[[], Any] = partial(object.__new__, kind)

    def make(*values: Any) -> Any:
        message: Any = new()
        for set_to, value in zip(setters, values, strict=True):
            set_to(message, value)
        return message

    return make


_FINISHED_FIELDS = [each.name for each in fields(QueriesFinished)]
_submit_queries = _maker(SubmitQueries)
_run_queries = _maker(RunQueries)
_answer_queries = _maker(AnswerQueries)


def _restored_submit(
    incarnation: str, queries: list[Plain], cancelled: tuple[int, ...], resent: tuple[int, ...]
) -> Any:
    return _submit_queries(
        incarnation, tuple([_query(each) for each in queries]), cancelled, resent
    )


def _restored_run(
    incarnation: str,
    proxy: Plain,
    assignments: list[Plain],
    cancelled: tuple[int, ...],
    compared: Plain,
) -> Any:
    made = [_assignment((each[0], _query(each[1]), *each[2:])) for each in assignments]
    return _run_queries(incarnation, _process(proxy), tuple(made), cancelled, compared)


def _restored_answer(incarnation: str, answers: list[Any]) -> Any:
    made = [_http_answer(each) if type(each) is tuple else each for each in answers]
    return _answer_queries(incarnation, tuple(made))


_PLAIN: dict[type, Callable[[Any], Plain]] = {
    tuple: lambda message: (ITSELF, message),
    SubmitQueries: _plain_submit,
    RunQueries: _plain_run,
    AnswerQueries: _plain_answer,
    QueriesFinished: _plain_finished,
}
_RESTORED: dict[int, Callable[..., Any]] = {
    ITSELF: lambda message: message,
    SUBMIT: _restored_submit,
    RUN: _restored_run,
    ANSWER: _restored_answer,
    FINISHED: _maker(QueriesFinished),
}
