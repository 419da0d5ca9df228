"""What benchmarks.requests asks of Greenroom and of Ray Serve: the same code, by either import.

Run with `greenroom` or `ray`, and the port.
"""

import sys

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

if sys.argv[1:2] == ["ray"]:
    import ray
    from ray import serve
else:
    from greenroom import serve

WIDTH = 256
OPTIONS = {"max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0}}  # Ray asks for one
api = FastAPI()


class Item(BaseModel):
    name: str
    value: int


@serve.deployment(**OPTIONS)
class Streaming:
    async def __call__(self, request: Request) -> StreamingResponse:
        chunks, size = (int(request.query_params[key]) for key in ("chunks", "size"))
        return StreamingResponse(self.parts(chunks, b"x" * size))

    async def parts(self, chunks: int, part: bytes):
        for _ in range(chunks):
            yield part


@serve.deployment(**OPTIONS)
class Bodies:
    async def __call__(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")


@serve.deployment(**OPTIONS)
@serve.ingress(api)
class Fast:
    @api.post("/echo")
    async def echo(self, item: Item) -> Item:
        return item


@serve.deployment(**OPTIONS)
class Model:
    def __init__(self) -> None:
        self.weights = np.eye(WIDTH)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def predict(self, values: list[int]) -> list[float]:
        rows = np.repeat(np.array(values, dtype=float)[:, None], WIDTH, axis=1)
        return (rows @ self.weights)[:, 0].tolist()

    async def __call__(self, request: Request) -> dict:
        body = await request.json()
        return {"name": body["name"], "value": await self.predict(body["value"])}


@serve.deployment(**OPTIONS)
class Last:
    async def __call__(self, value: int) -> int:
        return value


@serve.deployment(**OPTIONS)
class Middle:
    def __init__(self, last) -> None:
        self.last = last

    async def __call__(self, value: int) -> int:
        return await self.last.remote(value)


@serve.deployment(**OPTIONS)
class First:
    def __init__(self, middle) -> None:
        self.middle = middle

    async def __call__(self, request: Request) -> dict:
        body = await request.json()
        return {"name": body["name"], "value": await self.middle.remote(body["value"])}


def main(port: int) -> None:
    if sys.argv[1] == "ray":
        ray.init(include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Streaming.bind(), name="streaming", route_prefix="/stream")
    serve.run(Bodies.bind(), name="bodies", route_prefix="/bodies")
    serve.run(Model.bind(), name="batching", route_prefix="/batching")
    serve.run(First.bind(Middle.bind(Last.bind())), name="chain", route_prefix="/chain")
    serve.run(Fast.bind(), name="fastapi", route_prefix="/fastapi", blocking=True)


if __name__ == "__main__":
    main(int(sys.argv[2]))
