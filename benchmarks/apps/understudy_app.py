"""The echo as an Understudy deployment."""

import os

from understudy import serve


@serve.deployment
class Echo:
    async def __call__(self, request):
        if request.method == "GET":
            return {"pid": os.getpid()}
        return await request.json()


app = Echo.bind()
