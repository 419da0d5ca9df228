"""The echo as a BentoML service; the GET goes to an ASGI app mounted in the same worker."""

import os
from typing import Any

import bentoml
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


async def pid(request):
    return JSONResponse({"pid": os.getpid()})


@bentoml.service(workers=1)
@bentoml.asgi_app(Starlette(routes=[Route("/pid", pid)]), path="/alive")
class Echo:
    @bentoml.api
    async def echo(self, body: dict[str, Any], /) -> dict[str, Any]:
        return body
