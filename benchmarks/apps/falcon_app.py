"""The echo in the front end's own process, with no backend: the ceiling for a Falcon front end."""

import os

import falcon.asgi


class Echo:
    async def on_get(self, req, resp):
        resp.media = {"pid": os.getpid()}

    async def on_post(self, req, resp):
        resp.media = await req.get_media()


app = falcon.asgi.App()
app.add_route("/echo", Echo())
