"""serve.batch: what shares a batch, when it begins, and what each caller gets."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings, strategies as st

from greenroom import serve
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.serve.decorators import batching
from tests.support.virtual_time import VirtualTimeLoop, run

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"loop_factory": VirtualTimeLoop}


class Model:
    """Doubles numbers, and remembers what it was called with, and when."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.batches: list[list[Any]] = []
        self.begun_at: list[float] = []
        self.running = self.most_running = 0

    async def work(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.begun_at.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
        return [2 * item for item in items]

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=1)
    async def threes(self, items: list[Any]) -> list[Any]:
        return await self.work(items)

    @serve.batch
    async def plain(self, items: list[Any]) -> list[Any]:
        return await self.work(items)

    @serve.batch
    async def __private(self, items: list[Any]) -> list[Any]:
        return await self.work(items)

    async def private(self, item: Any) -> Any:
        return await self.__private(item)


async def outcomes(*calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls, return_exceptions=True))


# --- What a batch is -----------------------------------------------------------------------------


async def test_a_full_batch_begins_at_once_and_the_rest_after_its_wait():
    model = Model()
    assert await outcomes(*[model.threes(i) for i in range(5)]) == [0, 2, 4, 6, 8]
    assert model.batches == [[0, 1, 2], [3, 4]]
    assert model.begun_at == pytest.approx([0.0, 1.0])


async def test_the_bare_decorator_has_the_defaults_of_ray_serve():
    model = Model()
    await outcomes(*[model.plain(i) for i in range(11)])
    assert [len(batch) for batch in model.batches] == [10, 1]
    assert model.begun_at == pytest.approx([0.0, 0.01])


async def test_instances_never_share_a_batch():
    one, other = Model(), Model()

    await outcomes(one.plain(1), other.plain(2), one.plain(3), one.private(4), other.private(5))
    assert one.batches == [[1, 3], [4]]
    assert other.batches == [[2], [5]]


async def test_a_subclass_that_overrides_a_batch_method_can_call_the_one_it_overrides():
    class Child(Model):
        @serve.batch(max_batch_size=2)
        async def plain(self, items: list[Any]) -> list[Any]:
            parent = super().plain
            return await outcomes(*[parent(item + 1) for item in items])

    child = Child()
    assert await outcomes(child.plain(1), child.plain(2), child.plain(3)) == [4, 6, 8]


async def test_each_parameter_becomes_a_list_by_position_or_name_and_with_its_default():
    seen = []

    @serve.batch(max_batch_size=3)
    async def function(xs: list[int], ys: list[int] = 7, *, zs: list[str] = "z") -> list[Any]:
        seen.append((xs, ys, zs))
        return xs

    assert await outcomes(function(1, 2), function(xs=3, zs="a"), function(4, ys=5)) == [1, 3, 4]
    assert seen == [([1, 3, 4], [2, 7, 5], ["z", "a", "z"])]


async def test_a_call_that_does_not_fit_the_parameters_fails_alone():
    model = Model()
    good, missing, too_many = await outcomes(model.plain(1), model.plain(), model.plain(1, 2))
    assert good == 2
    assert isinstance(missing, TypeError)
    assert isinstance(too_many, TypeError)


# --- Sizes --------------------------------------------------------------------------------------


async def test_a_size_function_limits_what_a_batch_holds():
    seen: list[list[str]] = []

    def total(items: list[str]) -> int:
        return sum(map(len, items))

    @serve.batch(
        max_batch_size=6, batch_wait_timeout_s=1, batch_size_fn=lambda xs: sum(map(len, xs))
    )
    async def function(items: list[str]) -> list[str]:
        seen.append(items)
        return items

    *good, too_large = await outcomes(*map(function, ["aa", "bbb", "cc", "dddddd", "e", "fffffff"]))
    assert good == ["aa", "bbb", "cc", "dddddd", "e"]
    assert seen == [["aa", "bbb"], ["cc"], ["dddddd"], ["e"]]
    assert isinstance(too_large, InvalidRequestError)
    assert "an item of size 7 is larger than max_batch_size=6" in str(too_large)


async def test_an_item_that_the_size_function_cannot_take_fails_alone():
    def size(items: list[Any]) -> Any:
        return "many" if items == [3] else sum(len(item) for item in items if item != 3)

    @serve.batch(max_batch_size=6, batch_size_fn=size)
    async def function(items: list[Any]) -> list[Any]:
        return items

    first, no_len, no_number, last = await outcomes(
        function("a"), function(2), function(3), function("b")
    )
    assert (first, last) == ("a", "b")
    assert isinstance(no_len, TypeError)
    assert "batch_size_fn returned 'many', which is no number" in str(no_number)


# --- Failures -----------------------------------------------------------------------------------


async def test_a_returned_exception_fails_its_item_and_a_raised_one_all():
    class BadError(Exception):
        pass

    @serve.batch(max_batch_size=3)
    async def function(items: list[Any]) -> list[Any]:
        if "raise" in items:
            raise BadError("all")
        return [BadError("one") if item == "return" else item for item in items]

    some = await outcomes(function(1), function("return"), function(3))
    one, bad, three, *rest = some + await outcomes(function(1), function("raise"), function(3))
    assert (one, str(bad), three) == (1, "one", 3)
    assert [str(each) for each in rest] == ["all"] * 3
    assert all(isinstance(each, BadError) for each in rest)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_it_raises_ends_its_items_and_the_next_batch_runs(error):
    @serve.batch(max_batch_size=2)
    async def function(items: list[Any]) -> list[Any]:
        if "raise" in items:
            raise error
        return items

    async def guarded(item: Any) -> Any:
        try:
            return await function(item)
        except BaseException as raised:
            return type(raised).__name__

    cancelled = isinstance(error, asyncio.CancelledError)
    name = "GreenroomError" if cancelled else type(error).__name__
    assert [
        *await outcomes(guarded(1), guarded("raise")),
        *await outcomes(guarded(1), guarded(2)),
    ] == [name, name, 1, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], "returned 1 results for a batch of 2 items"),
        ([1, 2, 3], "returned 3 results for a batch of 2 items"),
        (None, "returned a NoneType; a batch function gives a list"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ("ab", "returned a str"),
        ({1, 2}, "returned a set"),
    ],
)
async def test_anything_but_one_result_per_item_is_an_error_for_all(returned, message):
    @serve.batch(max_batch_size=2)
    async def function(items: list[Any]) -> Any:
        return returned

    @serve.batch(max_batch_size=2)
    async def stream(items: list[Any]) -> Any:
        yield returned

    for error in await outcomes(function(1), function(2)):
        assert isinstance(error, GreenroomError)
        assert message in str(error)
    for error in await outcomes(collected(stream(1)), collected(stream(2))):
        assert message.replace("returned", "yielded") in str(error)


async def test_a_shared_exception_does_not_collect_the_tracebacks_of_all_callers():
    @serve.batch(max_batch_size=20)
    async def function(items: list[Any]) -> Any:
        raise ValueError("bad")

    lengths = []

    async def call(item: int) -> None:
        try:
            await function(item)
        except ValueError as error:
            trace, length = error.__traceback__, 0
            while trace is not None:
                trace, length = trace.tb_next, length + 1
            lengths.append(length)

    await outcomes(*map(call, range(20)))
    assert len(lengths) == 20
    assert len(set(lengths)) == 1


# --- Cancelling ---------------------------------------------------------------------------------


async def test_a_cancelled_item_leaves_the_batch_before_it_begins():
    model = Model()
    tasks = [asyncio.ensure_future(model.threes(i)) for i in range(2)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    await asyncio.sleep(0)
    first, *others = await outcomes(*tasks, model.threes(2))
    assert isinstance(first, asyncio.CancelledError)
    assert others == [2, 4]
    assert model.batches == [[1, 2]]
    assert model.begun_at == pytest.approx([1.0])  # when the oldest that is left has waited enough


async def test_a_running_batch_goes_on_while_anybody_wants_it_and_is_cancelled_then():
    model = Model(takes_s=5.0)

    tasks = [asyncio.ensure_future(model.threes(i)) for i in range(3)]
    await asyncio.sleep(1)
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.sleep(1)
    assert model.running == 1
    tasks[2].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert model.running == 0
    await outcomes(*[model.threes(i) for i in range(3)])  # its place is free
    assert asyncio.get_running_loop().time() == pytest.approx(7.0)


# --- Streams ------------------------------------------------------------------------------------


class Counter:
    """Counts up to each item's number, all of a batch in step."""

    def __init__(self) -> None:
        self.steps = 0
        self.closed = 0

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=1)
    async def count(self, upto: list[int]) -> Any:
        try:
            for number in range(1, max(upto) + 1):
                self.steps += 1
                yield [number if number <= last else StopIteration for last in upto]
                await asyncio.sleep(0.5)
        finally:
            self.closed += 1


async def collected(stream: Any) -> list[Any]:
    return [each async for each in stream]


async def test_a_streaming_batch_gives_each_item_its_own_stream():
    counter = Counter()
    assert await outcomes(*[collected(counter.count(n)) for n in (1, 3, 0)]) == [[1], [1, 2, 3], []]
    assert (counter.steps, counter.closed) == (3, 1)


async def test_errors_in_a_stream_end_one_item_or_all():
    @serve.batch(max_batch_size=2)
    async def stream(items: list[Any]) -> Any:
        yield items
        yield [ValueError("mine") if item == 1 else item for item in items]
        yield items
        raise KeyError("all")

    async def until_error(item: int) -> list[Any]:
        found: list[Any] = []
        try:
            async for each in stream(item):
                found.append(each)  # noqa: PERF401  # what came before the error counts
        except Exception as error:
            found.append(repr(error))
        return found

    assert await outcomes(until_error(1), until_error(2)) == [
        [1, "ValueError('mine')"],
        [2, 2, 2, "KeyError('all')"],
    ]


async def test_a_stream_that_nobody_reads_any_more_is_closed():
    counter = Counter()
    async for _ in (stream := counter.count(1000)):
        break
    await stream.aclose()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert counter.closed == 1
    assert await collected(counter.count(2)) == [1, 2]


async def test_a_stream_waits_for_a_reader_that_is_far_behind():
    made = 0

    @serve.batch(max_batch_size=2)
    async def stream(items: list[Any]) -> Any:
        nonlocal made
        for made in range(1, 1001):
            yield [made for _ in items]

    slow, quick = stream(1), stream(2)
    reading = asyncio.ensure_future(collected(quick))
    assert await anext(slow) == 1
    await asyncio.sleep(1)
    assert made < 300
    assert [each async for each in slow] == list(range(2, 1001))
    assert len(await reading) == 1000


# --- Limits that change, places where it runs ---------------------------------------------------


def test_limits_change_at_run_time_for_what_waits_too():
    model = Model()

    async def main() -> None:
        waiting = asyncio.ensure_future(outcomes(model.threes(1), model.threes(2)))
        await asyncio.sleep(0.1)
        model.threes.set_max_batch_size(2)
        await waiting
        Model.threes.set_batch_wait_timeout_s(0.2)
        await model.threes(3)

    try:
        run(main())
    finally:
        Model.threes.set_max_batch_size(3)
        Model.threes.set_batch_wait_timeout_s(1)
    assert model.batches == [[1, 2], [3]]
    assert model.begun_at == pytest.approx([0.1, 0.3])


def test_limits_may_be_changed_from_another_thread():
    @serve.batch(max_batch_size=100, batch_wait_timeout_s=1000)
    async def function(items: list[int]) -> list[int]:
        return items

    async def main() -> int:
        call = asyncio.ensure_future(function(1))
        await asyncio.sleep(0)
        thread = threading.Thread(target=function.set_batch_wait_timeout_s, args=(0,))
        thread.start()
        return await asyncio.wait_for(call, 20)

    assert asyncio.run(main()) == 1
    function.set_max_batch_size(2)  # with its loop closed


def test_limits_that_are_changed_while_a_queue_is_made_hold_for_it(monkeypatch):
    @serve.batch(max_batch_size=100, batch_wait_timeout_s=1000)
    async def function(items: list[int]) -> list[int]:
        return items

    changing = threading.Thread(target=function.set_batch_wait_timeout_s, args=(0,))
    make = batching._Batching.make

    def make_slowly(self: Any, loop: asyncio.AbstractEventLoop) -> Any:
        queue = make(self, loop)  # with the limits of now
        changing.start()
        changing.join(0.1)
        return queue

    monkeypatch.setattr(batching._Batching, "make", make_slowly)

    async def main() -> int:
        return await asyncio.wait_for(function(1), 20)

    assert asyncio.run(main()) == 1


def test_each_loop_has_a_queue_of_its_own_that_goes_with_it():
    model = Model()
    loops = []

    async def main() -> Any:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        return await model.plain(4)

    assert [run(main()), run(main())] == [8, 8]
    gc.collect()
    assert [loop() for loop in loops] == [None, None]


def test_what_a_batch_was_given_is_let_go_without_the_garbage_collector():
    @serve.batch
    async def sizes(models: list[Model]) -> list[int]:
        return [len(model.batches) for model in models]

    async def main() -> Any:
        model = Model()
        assert await sizes(model) == 0
        await asyncio.sleep(1)
        return weakref.ref(model)

    gc.disable()
    try:
        assert run(main())() is None
    finally:
        gc.enable()


def test_a_class_in_use_can_be_pickled_and_so_can_its_instances():
    class Local:
        @serve.batch(max_batch_size=2)
        async def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    used = Local()

    async def main(instance: Any) -> list[Any]:
        return await outcomes(instance.double(1), instance.double(2))

    assert run(main(used)) == [2, 4]
    pickled = cloudpickle.dumps((Local, used))
    script = (
        "import asyncio, pickle, sys\n"
        "cls, instance = pickle.load(sys.stdin.buffer)\n"
        "async def main(*each): return await asyncio.gather(*[one.double(2) for one in each])\n"
        "print(asyncio.run(main(cls(), instance, instance)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickled, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (b"[4, 4, 4]\n", b"")


def test_an_instance_without_a_dict_is_refused_naming_its_class():
    class Slotted:
        __slots__ = ()

        @serve.batch
        async def double(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="remove __slots__ from Slotted"):
        run(Slotted().double(1))


# --- Properties ---------------------------------------------------------------------------------

calls = st.lists(
    st.tuples(
        st.floats(0, 3, allow_nan=False).map(lambda seconds: round(seconds, 2)),  # before it
        st.integers(1, 4),  # size
        st.one_of(
            st.none(), st.floats(0.01, 3).map(lambda seconds: round(seconds, 2))
        ),  # till it is cancelled
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    calls=calls,
    limit=st.integers(4, 9),
    wait_s=st.sampled_from([0.0, 0.25, 1.0]),
    slots=st.integers(1, 3),
    takes_s=st.sampled_from([0.0, 0.3, 1.5]),
    counts=st.booleans(),
)
def test_every_item_is_in_one_batch_in_order_and_none_waits_too_long(
    calls, limit, wait_s, slots, takes_s, counts
):
    begun: list[tuple[float, list[int]]] = []
    ended: list[float] = []
    made_at: dict[int, float] = {}
    gone: dict[int, float] = {}  # cancelled, and when
    sizes = {number: size for number, (_, size, _) in enumerate(calls)}
    loop = VirtualTimeLoop()

    def size_of(items: list[int]) -> int:
        return len(items) if counts else sum(sizes[item] for item in items)

    @serve.batch(
        max_batch_size=limit,
        batch_wait_timeout_s=wait_s,
        max_concurrent_batches=slots,
        batch_size_fn=None if counts else size_of,
    )
    async def function(items: list[int]) -> list[int]:
        begun.append((loop.time(), items))
        assert len(begun) - len(ended) <= slots
        try:
            await asyncio.sleep(takes_s)
        finally:
            ended.append(loop.time())
        return [-item for item in items]

    async def call(number: int, after_s: float) -> int:
        await asyncio.sleep(after_s)
        made_at[number] = loop.time()
        return int(await function(number))

    async def leaving(number: int, after_s: float, cancel_s: float | None) -> Any:
        task = asyncio.ensure_future(call(number, after_s))
        if cancel_s is not None:
            await asyncio.sleep(cancel_s)
            if not task.done():
                gone[number] = loop.time()
                task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    async def main() -> list[Any]:
        each = [leaving(n, after_s, cancel_s) for n, (after_s, _, cancel_s) in enumerate(calls)]
        return list(await asyncio.gather(*each))

    try:
        results = loop.run_until_complete(main())
    finally:
        loop.close()
    for number, result in enumerate(results):
        assert number in gone if isinstance(result, asyncio.CancelledError) else result == -number
    run_items = [item for _, items in begun for item in items]
    assert len(run_items) == len(set(run_items))
    assert set(run_items) >= set(range(len(calls))) - set(gone)
    assert all(size_of(items) <= limit for _, items in begun)
    assert run_items == sorted(run_items, key=lambda item: made_at[item])
    for at, items in begun:
        assert_not_too_late(at, items[0], made_at[items[0]] + wait_s, begun, ended, slots)
        was_full = size_of(items) == limit or any(
            made <= at and gone.get(item, at + 1) >= at and size_of([*items, item]) > limit
            for item, made in made_at.items()
            if item not in items
        )
        assert was_full or at >= made_at[items[0]] + wait_s - 1e-6


def assert_not_too_late(
    at: float, item: int, due: float, begun: list[Any], ended: list[float], slots: int
) -> None:
    """A batch begins when its first item has waited long enough, or when a place is free."""
    if at > due + 1e-6:
        busy = sum(begin < at - 1e-6 for begin, _ in begun) - sum(end < at - 1e-6 for end in ended)
        assert busy >= slots, f"item {item} could have begun at {due}, not at {at}"
