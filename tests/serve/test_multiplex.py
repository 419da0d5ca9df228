"""serve.multiplexed: which models a replica has, and what loads and unloads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica import context as user_context

pytestmark = pytest.mark.anyio


class Model:
    def __init__(self, model_id: str, log: list[str]) -> None:
        self.model_id = model_id
        self.log = log

    def __del__(self) -> None:
        self.log.append(f"-{self.model_id}")


class AsyncModel(Model):
    async def __del__(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.log.append(f"-{self.model_id} awaited")


class Server:
    def __init__(self, kind: type[Model] = Model) -> None:
        self.kind = kind
        self.log: list[str] = []
        self.loading = 0

    async def load(self, model_id: str) -> Model:
        self.loading += 1
        assert self.loading == 1
        self.log.append(f"+{model_id}")
        await asyncio.sleep(0.001)
        self.loading -= 1
        if model_id.startswith("bad"):
            raise LookupError(f"no model {model_id}")
        return self.kind(model_id, self.log)

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: str) -> Model:
        return await self.load(model_id)

    @serve.multiplexed(max_num_models_per_replica=-1)
    async def unlimited(self, model_id: str) -> Model:
        return await self.load(model_id)

    @serve.multiplexed
    async def threes(self, model_id: str) -> Model:
        return await self.load(model_id)


@pytest.fixture
async def server():
    """Give a server whose models are unloaded at the end."""
    yield Server()
    await user_context.unload_models()
    assert user_context.model_ids() == ()


async def use(server: Server, *ids: str) -> None:
    for model_id in ids:
        model = await server.model(model_id)
        assert model.model_id == model_id
        del model


async def test_the_model_used_longest_ago_makes_room_before_the_next_is_loaded(server):
    await use(server, "a", "b", "a", "c", "a", "b")
    await user_context.unload_models()
    assert server.log == ["+a", "+b", "-b", "+c", "-c", "+b", "-a", "-b"]


async def test_the_default_is_three_and_minus_one_is_no_limit(server):
    for each in "abcd":
        await server.threes(each)
        await server.unlimited(each + each)
    assert user_context.model_ids() == ("aa", "b", "bb", "c", "cc", "d", "dd")


async def test_calls_for_a_model_that_is_being_loaded_share_the_load(server):
    models = await asyncio.gather(*[server.model(each) for each in "abababab"])
    assert len({id(model) for model in models}) == 2
    assert server.log == ["+a", "+b"]


async def test_a_failed_load_fails_all_who_wait_and_leaves_nothing(server):
    calls = [server.model("bad"), server.model("bad"), server.model("good")]
    first, second, good = await asyncio.gather(*calls, return_exceptions=True)
    assert first is second
    assert str(first) == "no model bad"
    assert good.model_id == "good"
    assert user_context.model_ids() == ("good",)
    with pytest.raises(LookupError):
        await server.model("bad")  # tried again
    assert server.log.count("+bad") == 2


async def test_a_cancelled_call_ends_no_load(server):
    first = asyncio.ensure_future(server.model("a"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(server.model("a"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).model_id == "a"
    assert first.cancelled()
    assert server.log == ["+a"]


async def test_a_model_that_is_still_used_is_finalized_once_when_it_is_not(server):
    used = await server.model("a")
    await use(server, "b", "c")
    assert server.log == ["+a", "+b", "+c"]
    del used
    assert server.log[-1] == "-a"
    await user_context.unload_models()
    assert sorted(server.log[-2:]) == ["-b", "-c"]


async def test_an_async_finalizer_is_awaited_once():
    server = Server(AsyncModel)
    await use(server, "a", "b", "c")
    await user_context.unload_models()
    assert server.log == ["+a", "+b", "-a awaited", "+c", "-b awaited", "-c awaited"]


async def test_an_unload_that_fails_is_logged_and_the_next_model_loaded(capsys):
    class Stuck:
        async def __del__(self) -> None:
            raise OSError("stuck")

    @serve.multiplexed(max_num_models_per_replica=1)
    async def load(model_id: str) -> Any:
        return Stuck() if model_id == "a" else model_id

    await load("a")
    with pytest.warns(RuntimeWarning, match="never awaited"):  # Python's own attempt
        assert await load("b") == "b"
    await user_context.unload_models()
    assert "unloading the model 'a'" in capsys.readouterr().err


async def test_the_listener_hears_of_changes_only_and_of_loads_when_they_begin(server):
    heard: list[tuple[str, ...]] = []
    user_context.on_models_changed(lambda: heard.append(user_context.model_ids()))
    try:
        await use(server, "a", "a", "b", "a", "c")
        await user_context.unload_models()
    finally:
        user_context.on_models_changed(None)
    assert heard == [("a",), ("a", "b"), ("a", "b", "c"), ("a", "c"), ("c",), ()]


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), TypeError, "model_id"),
        (("a", "b"), TypeError, "too many"),
        ((1,), TypeError, "must be a string, not 1"),
        ((None,), TypeError, "must be a string, not None"),
        (("",), ValueError, "the model id is empty; does the query have the header"),
    ],
)
async def test_a_call_without_a_model_id_says_so(args, error, message):
    with pytest.raises(error, match=message):
        await Server().model(*args)


def test_outside_of_queries_there_is_no_model_id():
    assert serve.get_multiplexed_model_id() == ""
