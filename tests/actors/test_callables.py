"""How methods of user code are called, and what is remembered of it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from greenroom.actors.callables import Manner, Manners


def plain() -> int:
    return 1


def taking(request: Any) -> Any:
    return request


async def asynchronous(request: Any) -> Any:
    return request


def generating() -> Iterator[int]:
    yield 1


async def generating_asynchronously(request: Any) -> AsyncIterator[Any]:
    yield request


class Methods:
    def plain(self) -> int:
        return 1

    async def asynchronous(self, request: Any) -> Any:
        return request


class AsyncInstance:
    async def __call__(self, request: Any) -> Any:
        return request


@pytest.mark.parametrize(
    ("function", "manner"),
    [
        (plain, Manner(takes_argument=False, is_async=False, makes_generator=False)),
        (taking, Manner(takes_argument=True, is_async=False, makes_generator=False)),
        (asynchronous, Manner(takes_argument=True, is_async=True, makes_generator=False)),
        (generating, Manner(takes_argument=False, is_async=False, makes_generator=True)),
        (
            generating_asynchronously,
            Manner(takes_argument=True, is_async=False, makes_generator=True),
        ),
        (Methods().plain, Manner(takes_argument=False, is_async=False, makes_generator=False)),
        (Methods().asynchronous, Manner(takes_argument=True, is_async=True, makes_generator=False)),
        (AsyncInstance(), Manner(takes_argument=True, is_async=True, makes_generator=False)),
        (
            functools.partial(asynchronous, 1),
            Manner(takes_argument=False, is_async=True, makes_generator=False),
        ),
        (dict, Manner(takes_argument=True, is_async=False, makes_generator=False)),
    ],
)
def test_a_callable_is_called_as_what_it_is(function: Any, manner: Manner) -> None:
    assert Manner.of(function) == manner
    assert Manners().of("name", function) == manner


def test_what_user_code_puts_in_a_methods_place_is_looked_at_again() -> None:
    manners, instance = Manners(), Methods()
    first = manners.of("plain", instance.plain)
    assert manners.of("plain", instance.plain) is first
    instance.plain = asynchronous  # type: ignore[method-assign,assignment]
    assert manners.of("plain", instance.plain).is_async
    assert manners.of("other", plain) == first
