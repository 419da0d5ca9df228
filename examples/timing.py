"""A middleware that tells clients how long their request took: see docs/http.md."""

import time


class Timing:
    def __init__(self, app, header: str = "server-timing") -> None:
        self.app = app
        self.header = header.encode()

    async def __call__(self, scope, receive, send) -> None:
        began = time.perf_counter()

        async def timed(event) -> None:
            if event["type"] == "http.response.start":
                took_ms = (time.perf_counter() - began) * 1000
                event["headers"] = [*event["headers"], (self.header, b"total;dur=%.1f" % took_ms)]
            await send(event)

        await self.app(scope, receive, timed)
