"""The echo as a Greenroom deployment, async and sync."""

import os

from greenroom import serve


@serve.deployment
class Echo:
    async def __call__(self, request):
        if request.method == "GET":
            return {"pid": os.getpid()}
        return await request.json()


@serve.deployment
class SyncEcho:
    def __call__(self, request):
        if request.method == "GET":
            return {"pid": os.getpid()}
        try:
            request.json().send(None)  # it never waits: so small a body has come with the request
        except StopIteration as done:
            return done.value


app = Echo.bind()
sync = SyncEcho.bind()
