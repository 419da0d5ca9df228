"""The calls that a batch is made of, and what becomes of them."""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from typing import Any, NamedTuple

from greenroom.actors import user_context
from greenroom.actors.user_context import RunningQuery

MAX_AHEAD = 256  # values of a streaming batch that one item may be behind


class Item:
    """One call."""

    __slots__ = ("batch", "context", "future", "owner", "query", "values")

    def __init__(self, owner: tuple[Any, ...], values: dict[str, Any]) -> None:
        self.owner = owner  # the instance, in a tuple; empty for a function
        self.values = values  # by parameter
        self.context: Context = copy_context()
        self.query = user_context.running.get()
        self.batch: Running | None = None  # once it has begun
        self.make_place()

    @property
    def group(self) -> Any:
        """What the items of a batch have in common."""
        return user_context.batching_group(self.query)

    def make_place(self) -> None:
        """Make what the outcome arrives in."""
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def put(self, outcome: Outcome) -> None:
        """Give it its outcome, if it has none yet."""
        if not self.future.done():
            self.future.set_result(outcome)

    async def result(self) -> Any:
        """Wait for the outcome, and return it or raise it."""
        return (await self.future).get()


class StreamedItem(Item):
    """One call of a streaming batch function."""

    __slots__ = ("arrived",)

    def make_place(self) -> None:
        """See :class:`Item`."""
        self.arrived: asyncio.Queue[Outcome | None] = asyncio.Queue()

    def put(self, outcome: Outcome | None) -> None:
        """Add the next value, or the end."""
        self.arrived.put_nowait(outcome)

    async def next(self) -> Outcome | None:
        """Wait for the next value; None at the end."""
        outcome = await self.arrived.get()
        if self.batch is not None:
            self.batch.moved.set()
        return outcome


class Outcome(NamedTuple):
    """A result or an exception.

    Futures are given it whole: they refuse StopIteration, and complain of exceptions that nobody
    has asked for. The traceback is kept beside, for each caller of a batch raises the same
    exception, and would lengthen that of the others.
    """

    value: Any
    error: BaseException | None = None
    traceback: Any = None

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """Return what was raised."""
        return cls(None, error, error.__traceback__)

    @classmethod
    def of(cls, result: Any) -> Outcome:
        """Return what a batch function has returned for one item."""
        return cls.failed(result) if isinstance(result, Exception) else cls(result)

    def get(self) -> Any:
        """Return the value, or raise."""
        if self.error is not None:
            raise self.error.with_traceback(self.traceback)
        return self.value


class Running:
    """A batch that has begun."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.wanted: dict[Any, None] = dict.fromkeys(items)  # those whose callers still wait
        self.moved = asyncio.Event()  # set when a caller has taken a value, or left
        self.task: asyncio.Task[None] | None = None
        self.query: RunningQuery | None = None  # what its calls through handles belong to

    def cancel(self) -> None:
        """End it: nobody wants it any more; harmless when it is done."""
        if self.task is not None:
            self.task.cancel()
        if self.query is not None:
            self.query.cancel_calls()

    def ended(self) -> None:
        """Note that user code has returned."""
        if self.query is not None:
            self.query.has_ended = True

    def put_all(self, outcome: Outcome | None) -> None:
        """Give it to all whose callers still wait."""
        for item in self.wanted:
            item.put(outcome)

    def drop(self, item: Item) -> bool:
        """Give an item nothing any more; tell whether there was anything to come."""
        self.moved.set()
        return self.wanted.pop(item, self) is None

    @property
    def is_ahead(self) -> bool:
        """Whether a caller has fallen too far behind."""
        return any(item.arrived.qsize() >= MAX_AHEAD for item in self.wanted)
