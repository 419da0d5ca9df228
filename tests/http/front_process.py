"""A real front, gunicorn and all, whose link is a fake: run by the tests as a script."""

import asyncio
import json
import os
import time
from urllib.parse import unquote

from fake_link import FakeLink  # beside this script

from greenroom.actors.messages.queries import HttpAnswer
from greenroom.actors.runtime.settings import read_settings
from greenroom.http_front import server
from greenroom.http_front.worker import FrontWorker

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
        "cancelled_at": link.cancelled_at,
    }


link = FakeLink(answer)
begin = FrontWorker.init_process


def begin_late(worker):
    """Begin at once in the first worker, and in others when there is a file of this name."""
    while worker.age > 1 and not os.path.exists(os.environ["OTHERS_BEGIN"]):
        time.sleep(0.01)
    begin(worker)


if __name__ == "__main__":
    if "OTHERS_BEGIN" in os.environ:
        FrontWorker.init_process = begin_late
    server.run(read_settings(), lambda _: link)
