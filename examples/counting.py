"""A FastAPI app on a class: typed parameters, and an answer that leaves part by part."""

import asyncio

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from greenroom import serve

api = FastAPI(title="Counting")


@serve.deployment
@serve.ingress(api)
class Counting:
    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    @api.get("/up-to/{number}")
    async def up_to(self, number: int, by: int = 1) -> list[int]:
        return list(range(by, number + 1, by))

    @api.get("/slowly/{number}")
    async def slowly(self, number: int) -> StreamingResponse:
        async def count():
            for each in range(1, number + 1):
                yield f"data: {each}\n\n"
                await asyncio.sleep(self.pause_s)

        return StreamingResponse(count(), media_type="text/event-stream")


app = Counting.bind(pause_s=0.2)
