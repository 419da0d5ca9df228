"""What a mailbox gives to which handler."""

import asyncio
from contextlib import closing

from greenroom.actors.messages.queries import AskProxy
from greenroom.actors.transport.mailbox import attach
from tests.support.timing import until

PORT = 1


def ours(number):
    return AskProxy(request_id=str(number), what="routes")


def test_our_messages_go_past_thespian_and_all_keep_their_order():
    seen = []
    with closing(asyncio.new_event_loop()) as loop:
        one, other = (attach(PORT, loop, lambda *_: None) for _ in range(2))
        other.inbox.handle = lambda envelope: seen.append(("thespian's", envelope.message))
        other.inbox.handle_ours = lambda message, sender: seen.append((sender, message))
        expected = []
        with closing(one), closing(other):
            for number in range(300):
                if number % 7 == 0:
                    one.send_loosely(other.address, number)
                elif number % 3:
                    one.send_loosely(other.address, ours(number))
                else:
                    one.send(other.address, ours(number), lambda: None, None)
                is_ours = number % 7 != 0
                message = ours(number) if is_ours else number
                expected.append((one.address if is_ours else "thespian's", message))
                if number % 11 == 0:
                    loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(until(lambda: len(seen) == 300))
    assert seen == expected


def test_what_arrives_while_nothing_is_handled_waits():
    seen = []
    with closing(asyncio.new_event_loop()) as loop:
        one, other = (attach(PORT, loop, lambda *_: None) for _ in range(2))
        other.inbox.handle_ours = lambda message, _: seen.append(message)
        with closing(one), closing(other):
            one.send(other.address, ours(0), lambda: None, None)
            loop.run_until_complete(until(lambda: seen))
            handle, other.inbox.handle = other.inbox.handle, None
            one.send_loosely(other.address, ours(1))
            loop.run_until_complete(until(lambda: len(other.inbox) == 1))
            assert seen == [ours(0)]
            other.inbox.handle = handle
            other.inbox.deliver()
    assert seen == [ours(0), ours(1)]
