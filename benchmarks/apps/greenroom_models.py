"""A batched model and a token stream as Greenroom deployments; the argument is the port."""

import os
import sys

import numpy as np
from starlette.responses import StreamingResponse

from greenroom import serve

WIDTH, TOKENS = 256, 200


@serve.deployment
class Model:
    def __init__(self):
        self.weights = np.eye(WIDTH)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def predict(self, values):
        rows = np.repeat(np.array(values, dtype=float)[:, None], WIDTH, axis=1)
        return (rows @ self.weights)[:, 0].tolist()

    async def __call__(self, request):
        if request.method == "GET":
            return {"pid": os.getpid()}
        body = await request.json()
        return {"name": body["name"], "value": await self.predict(body["value"])}


@serve.deployment
class Tokens:
    async def __call__(self, request):
        return StreamingResponse(self.tokens(), media_type="text/event-stream")

    async def tokens(self):
        for _ in range(TOKENS):
            yield "data: token\n\n"


if __name__ == "__main__":
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Tokens.bind(), name="tokens", route_prefix="/tokens")
    serve.run(Model.bind(), name="batching", route_prefix="/batching", blocking=True)
