"""The short way: plain requests from the parser to the router and back, past ASGI and Falcon.

ASGI takes a request through a task, and Falcon through a request and a response object more. A
request whose body is here, and whose response is whole, needs none of that: the query leaves, and a
callback writes the answer. docs/performance.md says what this brings. The bytes are the same as
those of the long way, because both take the steps in :mod:`.request`.

With the option ``short_way`` off, Falcon makes the query; since nothing waits for that, it takes no
task either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from greenroom.actors.runtime.loop import nothing
from greenroom.http_front.app import Front
from greenroom.http_front.protocol import Begin, Cycle
from greenroom.http_front.request import CLIENT_LEFT, Reply, Request, query_for
from greenroom.http_front.responses import Answer, end_body, reply_for, reply_to


def beginning(front: Front) -> Begin | None:
    """Return what begins a request whose body is here, for a worker's connections.

    It returns False for a request that goes the long way: it is not plain, or there is no router to
    ask yet. None where middlewares want all requests as ASGI has them.
    """
    if front.options.middlewares:
        return None
    return partial(_begin, front)


def _begin(front: Front, cycle: Cycle, body: bytes) -> bool:
    request, head = cycle.request, cycle.request.head
    if head.query is None and not front.is_plain(head, body):
        return False
    request.begin(front.requests)
    try:
        if front.options.short_way:
            front.admit(head)
            query = query_for(request, front.link.next_id(), front.options.request_timeout_s, body)
        else:
            query = front.query_by_falcon(request, body)
        cancel = front.link.submit(query, partial(_answered, front, cycle))
    except Exception as error:
        _send(front, cycle, reply_for(error, request))
    else:
        if cancel is None:
            return False
        if cycle.leave is nothing:  # else parts of the answer are being sent
            cycle.leave = partial(_leave, request, cancel)
    return True


def _leave(request: Request, cancel: Callable[[], object]) -> None:
    cancel()
    request.status = CLIENT_LEFT
    request.end()


def _answered(front: Front, cycle: Cycle, answer: Answer) -> None:
    request = cycle.request
    if request.requests is None:
        return
    try:
        reply = reply_to(answer, request)
    except Exception as error:
        reply = reply_for(error, request)
    _send(front, cycle, reply)


def _send(front: Front, cycle: Cycle, reply: Reply) -> None:
    request = cycle.request
    if front.add_cors is not None:
        reply = reply._replace(headers=front.add_cors(request.scope, reply.headers))
    if isinstance(reply.body, bytes):
        cycle.reply(reply)
        request.end()
    else:
        request.reply = reply
        cycle.go_on(front).add_done_callback(partial(_sent, request))


def _sent(request: Request, _task: object) -> None:
    """Release what a task holds that may have been cancelled before its first step."""
    reply, request.reply = request.reply, None
    end_body(reply)
    request.status = request.status or CLIENT_LEFT
    request.end()
