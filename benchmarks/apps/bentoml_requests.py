"""What benchmarks.requests asks of BentoML: its APIs, and an ASGI app mounted in its worker."""

from collections.abc import AsyncGenerator

import bentoml
import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

WIDTH = 256
# By default a service drops its connections to another after 100 calls, whatever is under way on
# them: at 16 connections one in ten requests of the chain was a 500.
SETTINGS = {"workers": 1, "runner_connection": {"max_requests": 10**9, "max_age": 86_400.0}}
api = FastAPI()


class Item(BaseModel):
    name: str
    value: float


@api.post("/echo")
async def echo(item: Item) -> Item:
    return item


@api.post("/bodies")
async def bodies(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")


@bentoml.service(**SETTINGS)
class Model:
    def __init__(self) -> None:
        self.weights = np.eye(WIDTH)

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=1000)
    async def predict(self, values: list[float]) -> list[float]:
        rows = np.repeat(np.array(values, dtype=float)[:, None], WIDTH, axis=1)
        return (rows @ self.weights)[:, 0].tolist()


@bentoml.service(**SETTINGS)
class Last:
    @bentoml.api
    async def run(self, value: int) -> int:
        return value


@bentoml.service(**SETTINGS)
class Middle:
    last = bentoml.depends(Last)

    @bentoml.api
    async def run(self, value: int) -> int:
        return await self.last.to_async.run(value)


@bentoml.service(**SETTINGS)
@bentoml.asgi_app(api, path="/fastapi")
class First:
    middle = bentoml.depends(Middle)
    model = bentoml.depends(Model)

    @bentoml.api
    async def chain(self, name: str, value: int) -> dict:
        return {"name": name, "value": await self.middle.to_async.run(value)}

    @bentoml.api
    async def batching(self, name: str, value: float) -> dict:
        (predicted,) = await self.model.to_async.predict([value])
        return {"name": name, "value": predicted}

    @bentoml.api
    async def stream(self, chunks: int, size: int) -> AsyncGenerator[str, None]:
        part = "x" * size
        for _ in range(chunks):
            yield part
