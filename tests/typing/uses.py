"""What users write, as ``mypy --strict`` is to see it: `tox -e types` checks this file.

Each ``type: ignore`` here is an error that mypy must find, or it tells of an unused one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, assert_type

from starlette.requests import Request

from greenroom import serve
from greenroom.serve.config import AutoscalingConfig
from greenroom.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator


class Adder:
    def __init__(self, increment: int) -> None:
        self.increment = increment

    async def __call__(self, number: int) -> int:
        return number + self.increment

    async def stream(self, number: int) -> AsyncIterator[int]:
        yield number


@serve.deployment(num_replicas=2, autoscaling_config=None, ray_actor_options={"num_cpus": 1})
class Ingress:
    def __init__(self, adder: DeploymentHandle[int]) -> None:
        self.adder = adder

    async def __call__(self, request: Request) -> int:
        response = self.adder.remote(int(request.query_params["n"]))
        assert_type(response, DeploymentResponse[int])
        assert_type(await response, int)
        assert_type(self.adder.options(shard_key="a").remote(1).result(), int)
        assert_type(self.adder.other.remote(1), DeploymentResponse[Any])
        values = self.adder.options(stream=True).stream.remote(1)
        assert_type(values, DeploymentResponseGenerator[Any])
        return sum([value async for value in values])

    @serve.batch(max_batch_size=4)
    async def doubled(self, numbers: list[int]) -> list[str]:
        return [str(2 * number) for number in numbers]

    @serve.batch
    async def halved(self, numbers: list[int]) -> list[float]:
        return [number / 2 for number in numbers]

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: str) -> bytes:
        return model_id.encode()

    async def use(self) -> None:
        assert_type(await self.doubled(3), str)
        assert_type(await self.halved(3), float)
        assert_type(await self.model("a"), bytes)
        self.doubled.set_max_batch_size(8)
        await self.doubled("3")  # type: ignore[arg-type]


@serve.batch
async def squared(numbers: list[int]) -> list[int]:
    return [number**2 for number in numbers]


@serve.deployment
async def greet(request: Request) -> str:
    return "hello"


async def use() -> None:
    assert_type(await squared(3), int)
    assert_type(greet, serve.Deployment[str])
    assert_type(serve.run(greet.bind()), DeploymentHandle[str])


adder = serve.deployment(Adder)
assert_type(adder, serve.Deployment[int])
assert_type(adder.options(name="another").bind(1), serve.Application[int])
assert_type(serve.run(adder.bind(1)).remote(2).result(timeout_s=1), int)
app = Ingress.options(autoscaling_config=AutoscalingConfig(max_replicas=2)).bind(adder.bind(1))
assert_type(serve.run(app), DeploymentHandle[Any])
serve.deployment(num_replica=2)  # type: ignore[call-overload]
serve.deployment(num_replicas="many")  # type: ignore[call-overload]
