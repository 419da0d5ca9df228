"""A real front, gunicorn and all, whose link is a fake: run by the tests as a script."""

import asyncio
import json
import os
import signal
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


def be_late(step):
    """Have workers but the first one take this step when there is a file OTHERS_BEGIN."""
    take = getattr(FrontWorker, step)

    def take_late(worker):
        while worker.age > 1 and not os.path.exists(os.environ["OTHERS_BEGIN"]):
            time.sleep(0.01)
        # Programs that user code starts when it is loaded would inherit it.
        assert step != "load_wsgi" or not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        take(worker)

    setattr(FrontWorker, step, take_late)


if __name__ == "__main__":
    if "LATE_STEP" in os.environ:
        be_late(os.environ["LATE_STEP"])
    server.run(read_settings(), lambda _: link)
