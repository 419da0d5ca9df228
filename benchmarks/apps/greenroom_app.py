"""The echo as a Greenroom deployment."""

import os

from greenroom import serve


@serve.deployment
class Echo:
    async def __call__(self, request):
        if request.method == "GET":
            return {"pid": os.getpid()}
        return await request.json()


app = Echo.bind()
