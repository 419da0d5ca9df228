"""How methods of user code are called, and what is remembered of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from greenroom.actors.replica.servable import Manner, Servable, http_methods


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


NO_THREADS: Any = None
ONE = {"takes_argument"}


@pytest.mark.parametrize(
    ("function", "traits"),
    [
        (plain, set()),
        (taking, ONE),
        (asynchronous, ONE | {"is_async"}),
        (generating, {"makes_generator"}),
        (generating_asynchronously, ONE | {"makes_generator"}),
        (Methods().plain, set()),
        (Methods().asynchronous, ONE | {"is_async"}),
        (AsyncInstance(), ONE | {"is_async"}),
        (functools.partial(asynchronous, 1), {"is_async"}),
        (dict, {"takes_argument"}),
    ],
)
def test_a_callable_is_called_as_what_it_is(function, traits):
    manner = Manner.of(function)
    assert {name for name, has_it in manner._asdict().items() if has_it} == traits
    assert Servable(NO_THREADS).manner("name", function) == manner


def test_what_user_code_puts_in_a_methods_place_is_read_again():
    servable, instance = Servable(NO_THREADS), Methods()
    first = servable.manner("plain", instance.plain)
    assert servable.manner("plain", instance.plain) is first
    instance.plain = asynchronous  # type: ignore[method-assign,assignment]
    assert servable.manner("plain", instance.plain).is_async
    assert servable.manner("other", plain) == first


class Base(threading.Thread):
    def of_a_base(self) -> None: ...

    def hidden_below(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Served(Base, dict):  # type: ignore[type-arg]
    called = print
    partial = functools.partial(print)
    of_another = Methods().plain
    hidden_below = None  # type: ignore[assignment]
    Nested = Methods

    def __init__(self) -> None:
        super().__init__()
        self.attribute = plain

    def __call__(self) -> None: ...

    def public(self) -> None: ...

    def _private(self) -> None: ...

    def check_health(self) -> None: ...

    def reconfigure(self, user_config: Any) -> None: ...

    async def asynchronous(self) -> None: ...

    def generating(self) -> Iterator[int]:
        yield 1

    @functools.wraps(plain)
    def wrapping(self) -> int:
        return 1

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_the_class(cls) -> None: ...

    @property
    def computed(self) -> Any:
        return plain


def test_requests_may_name_what_the_class_or_a_base_of_the_users_defines_as_a_function():
    own = {"public", "asynchronous", "generating", "wrapping", "static", "of_the_class"}
    assert http_methods(Served) == own | {"of_a_base", "join"}
    assert http_methods(type(plain)) == frozenset()
    assert http_methods(type(functools.partial(plain))) == frozenset()


def test_what_a_library_has_put_before_a_method_of_the_users_is_not_to_be_named():
    class Own:
        def start(self) -> None: ...

        def own(self) -> None: ...

    class Mixed(threading.Thread, Own): ...

    assert http_methods(Mixed) == {"own"}
