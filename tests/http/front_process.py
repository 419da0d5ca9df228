"""A real front, gunicorn and all, whose link is a fake: run by the tests as a script."""

import asyncio
import json
import os
from urllib.parse import unquote

from fake_link import FakeLink  # beside this script

from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer
from greenroom.actors.runtime.settings import read_settings
from greenroom.http_front import server

JSON = ((b"content-type", b"application/json"),)


async def answer(asked):
    what, _, argument = asked.path[1:].partition("/")
    if what == "sleep":
        await asyncio.sleep(float(argument))
    elif what == "gate":
        while not os.path.exists(f"/{argument}"):
            await asyncio.sleep(0.01)
    elif what == "hang":
        await asyncio.Event().wait()
    elif what == "fail":
        return FailedAnswer(0, argument, f"{argument} as asked for")
    elif what == "cookies":
        cookies = ((b"set-cookie", b"a=1; Path=/"), (b"set-cookie", b"b=\xe4; Path=/"))
        return HttpAnswer(0, 200, cookies, b"two cookies")
    elif what == "inject":
        return HttpAnswer(0, 200, ((b"x-bad", b"1\r\nx-injected: 1"),), b"split")
    elif what == "status":
        return HttpAnswer(0, int(argument), (), b"a body")
    elif what == "large":
        return HttpAnswer(0, 200, (), b"x" * int(argument))
    return HttpAnswer(0, 200, JSON, json.dumps(description(asked)).encode())


def description(asked):
    return {
        "path": asked.path,
        "raw_path": asked.call.raw_path.decode("latin-1"),
        "query": asked.call.query_string.decode("latin-1"),
        "method": asked.http_method,
        "body_size": len(asked.call.body),
        "body": asked.call.body[:200].decode("latin-1"),
        "headers": [name.decode("latin-1") for name, _ in asked.call.headers],
        "request_id": asked.request_id,
        "pid": os.getpid(),
        "asked": len(link.asked),
        "asked_paths": [unquote(other.path) for other in link.asked],
        "cancelled": link.cancelled,
    }


link = FakeLink(answer)


if __name__ == "__main__":
    server.run(read_settings(), lambda _: link)
