"""A WebSocket that answers while its client talks, and an upload that is taken part by part."""

import hashlib

from fastapi import FastAPI, Request, WebSocket

from greenroom import serve

api = FastAPI(title="Live")


@serve.deployment
@serve.ingress(api)
class Live:
    def __init__(self, unit: str) -> None:
        self.unit = unit

    @api.websocket("/count")
    async def count(self, websocket: WebSocket) -> None:
        await websocket.accept()
        total = 0
        async for text in websocket.iter_text():
            total += len(text.split())
            await websocket.send_json({self.unit: total})

    @api.put("/checksum")
    async def checksum(self, request: Request) -> dict[str, str]:
        digest = hashlib.sha256()
        async for part in request.stream():
            digest.update(part)
        return {"sha256": digest.hexdigest()}


app = Live.bind(unit="words")
