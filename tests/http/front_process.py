"""A real front, gunicorn and all, whose link is a fake: run by the tests as a script."""

import asyncio
import json
import os
from urllib.parse import unquote

from fake_link import FakeLink  # beside this script

from greenroom.actors.messages.queries import HttpAnswer
from greenroom.actors.runtime.settings import read_settings
from greenroom.http_front import server

JSON = ((b"content-type", b"application/json"),)


async def answer(asked):
    what, _, argument = asked.path[1:].partition("/")
    if what == "gate":
        while not os.path.exists(f"/{argument}"):
            await asyncio.sleep(0.01)
    elif what == "hang":
        await asyncio.Event().wait()
    elif what == "large":
        return HttpAnswer(0, 200, (), b"x" * int(argument))
    return HttpAnswer(0, 200, JSON, json.dumps(description(asked)).encode())


def description(asked):
    return {
        "path": asked.path,
        "body_size": len(asked.call.body),
        "pid": os.getpid(),
        "asked": len(link.asked),
        "asked_paths": [unquote(other.path) for other in link.asked],
        "cancelled": link.cancelled,
    }


link = FakeLink(answer)


if __name__ == "__main__":
    server.run(read_settings(), lambda _: link)
