"""What several tests share, as long as each of them leaves it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import pytest

Kind = TypeVar("Kind")

has_failed = pytest.StashKey[bool]()  # of a test: tests/conftest.py notes it


class Kept(Generic[Kind]):
    """Made when it is first asked for; a test that fails ends it, so that the next one has another.

    ``restore`` is called before each test but the first: it mends what a test may leave otherwise,
    such as a system that was stopped, and raises AssertionError where it cannot.
    """

    def __init__(
        self,
        make: Callable[[], AbstractContextManager[Kind]],
        restore: Callable[[Kind], None] = lambda _: None,
    ) -> None:
        self._make, self._restore = make, restore
        self._has: list[Kind] = []  # one at most
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def lent(self, request: pytest.FixtureRequest) -> Iterator[Kind]:
        """Lend it to one test; a fixture's body."""
        succeeded = False
        try:
            if self._has:
                self._restore(self._has[0])
            else:
                self._has.append(self._stack.enter_context(self._make()))
            yield self._has[0]
            succeeded = not request.node.stash.get(has_failed, False)
        finally:
            if not succeeded:
                self.end()

    def another(self) -> Kind:
        """End the one that a test was lent, and return another in its place."""
        self.end()
        self._has.append(self._stack.enter_context(self._make()))
        return self._has[0]

    def end(self) -> None:
        """End it, and check what ``make`` checks then."""
        self._has.clear()
        self._stack.close()
