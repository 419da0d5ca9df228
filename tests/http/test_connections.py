"""Which connections the worker takes, gives up on, and believes."""

import asyncio
import contextlib
import errno
import importlib.util
import os
import re
import socket
import struct
from functools import partial

import pytest

from greenroom.actors.runtime.loop import new_event_loop
from greenroom.core.config import HTTPOptions
from greenroom.http_front import connections as module
from greenroom.http_front.clients import MAX_HOPS, ClientCounts, TrustedProxies
from greenroom.http_front.connections import Connections, Listener, Pace, has_left
from greenroom.http_front.protocol import FrontProtocol
from greenroom.http_front.request import Reply
from greenroom.http_front.worker import most_connections
from tests.http.wire import Conversation, respond, turn_over

pytestmark = pytest.mark.anyio

HEADERS_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 90.0
OPTIONS = HTTPOptions()
HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /broken HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """One connection, whose app answers each request once it is told to; ``now`` is its time."""

    def __init__(self, loop):
        self.loop = loop
        self.now = loop.time()
        self.asked = []
        self.cancelled = []
        self.answers = asyncio.Semaphore(0)
        self.connection = Conversation(self.answer, OPTIONS)
        self.connections = self.connection.connections
        self.wire = self.connection.wire

    async def answer(self, scope, receive, send):
        self.asked.append(scope["path"])
        try:
            await self.answers.acquire()
            while (await receive()).get("more_body"):
                pass
        except asyncio.CancelledError:
            self.cancelled.append(scope["path"])
            raise
        await respond(send, scope["path"].encode())

    def say(self, data):
        async def arrive():
            self.connection.say(data)
            await turn_over()

        self.loop.run_until_complete(arrive())

    def let_answer(self):
        self.answers.release()
        self.loop.run_until_complete(turn_over())

    def is_closed_after(self, seconds, within_s=None):
        self.connections.close_idle(self.now + seconds, within_s)
        return self.wire.closed


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio", {"loop_factory": new_event_loop}


@pytest.fixture
def loop():
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def server(loop, monkeypatch):
    async def make():
        return Server(loop)

    server = loop.run_until_complete(make())
    monkeypatch.setattr(loop, "time", lambda: server.now)
    yield server
    loop.run_until_complete(server.connection.end())


def test_a_new_connection_that_stays_silent_is_closed(server):
    assert not server.is_closed_after(HEADERS_TIMEOUT_S - 1)
    assert server.is_closed_after(HEADERS_TIMEOUT_S + 1)
    assert server.wire.written == b""


def test_half_of_the_headers_are_not_waited_for_longer_than_that(server):
    server.say(HALF)
    assert not server.is_closed_after(HEADERS_TIMEOUT_S - 1)
    server.now += 2
    server.say(b"more")
    assert server.is_closed_after(HEADERS_TIMEOUT_S - 1), "a byte now and then gains no time"
    assert server.wire.written.startswith(b"HTTP/1.1 408 ")


def test_nor_are_those_of_a_later_request(server):
    server.say(WHOLE)
    server.let_answer()
    server.say(HALF)
    assert server.is_closed_after(HEADERS_TIMEOUT_S + 1)
    assert server.wire.written.endswith(b"the headers did not arrive in time")


def test_a_request_under_way_is_left_alone(server):
    server.say(WHOLE)
    for seconds in (0, 1000, 2000):
        assert not server.is_closed_after(seconds, within_s=0)


def test_a_connection_that_was_served_is_kept_for_a_time(server):
    server.say(WHOLE)
    server.let_answer()
    assert not server.is_closed_after(KEEP_ALIVE_S - 1)
    assert server.is_closed_after(KEEP_ALIVE_S + 1)


@pytest.mark.parametrize("pieces", [(b"\r\n",), (b"\r", b"\n"), (b"\r\n" * 1000, b"\r", b"\n\r\n")])
def test_empty_lines_behind_a_request_begin_no_other(server, pieces):
    server.say(WHOLE)
    server.let_answer()
    answer = server.wire.written
    for piece in pieces:
        server.say(piece)
    assert not server.is_closed_after(KEEP_ALIVE_S - 1)
    server.say(WHOLE)
    server.let_answer()
    assert server.wire.written == answer * 2
    server.say(b"\r\n")
    assert server.is_closed_after(KEEP_ALIVE_S + 1)
    assert server.wire.written == answer * 2, "nor do they gain time"


@pytest.mark.parametrize("was_served", [True, False])
def test_nor_do_those_that_come_in_halves(server, was_served):
    if was_served:
        server.say(WHOLE)
        server.let_answer()
    began_at = server.now
    server.say(b"\r")
    while not server.wire.closed and server.now < began_at + 200:
        server.now += 1
        if not server.is_closed_after(0):
            server.say(b"\n")
            server.say(b"\r")
    limit_s = KEEP_ALIVE_S if was_served else HEADERS_TIMEOUT_S
    assert limit_s <= server.now - began_at <= limit_s + 2


@pytest.mark.parametrize("was_served", [True, False])
def test_a_worker_that_leaves_closes_what_is_not_in_use(server, was_served):
    if was_served:
        server.say(WHOLE)
        server.let_answer()
    assert not server.is_closed_after(0.2, within_s=0.3), "a request may be on its way"
    assert server.is_closed_after(0.4, within_s=0.3)


def test_nor_one_whose_request_is_here_though_it_is_not_read_yet(server, pair):
    near, _ = pair
    server.wire.socket.fileno = near.fileno
    assert not server.is_closed_after(KEEP_ALIVE_S + 1, within_s=0.3)
    near.recv(1000)
    assert server.is_closed_after(KEEP_ALIVE_S + 1, within_s=0.3)


@pytest.mark.parametrize("has_unsent", [False, True])
def test_who_leaves_wants_no_answer(server, has_unsent):
    server.say(WHOLE + WHOLE.replace(b"/ ", b"/second "))
    protocol = server.connection.protocol
    # What was written and is never taken keeps an asyncio transport until TCP gives it up.
    protocol.eof_received() if has_unsent else protocol.connection_lost(None)
    server.loop.run_until_complete(turn_over())
    assert server.cancelled == ["/"]
    assert server.asked == ["/"], "the second's turn never comes"
    assert has_unsent or not server.connections.all


def test_a_refusal_waits_for_the_answer_to_the_request_before(server):
    server.say(WHOLE + b"nonsense\r\n\r\n")
    assert server.wire.written == b""
    server.let_answer()
    first, second = server.wire.written.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert first.endswith(b"\r\n\r\n/")
    assert second.startswith(b"400 ")
    assert b"connection: close" in second
    assert server.wire.closed


def test_a_body_that_cannot_be_read_ends_its_own_request(server):
    server.say(CHUNKED)
    server.say(b"zz\r\n")
    assert server.wire.written.startswith(b"HTTP/1.1 400 ")
    assert server.wire.closed
    assert server.cancelled == ["/broken"]


def test_and_not_those_before_it(server):
    server.say(WHOLE + WHOLE.replace(b"/ ", b"/second ") + CHUNKED + b"zz\r\n")
    server.let_answer()
    server.let_answer()
    assert server.asked == ["/", "/second"]
    assert re.findall(rb"HTTP/1.1 (\d+) ", server.wire.written) == [b"200", b"200", b"400"]
    assert server.wire.closed


def test_what_is_sent_ahead_is_not_read_before_its_turn(server):
    server.say(WHOLE + WHOLE * 1000)
    assert server.asked == ["/"]
    assert server.wire.paused
    for _ in range(1000):
        server.let_answer()
        if len(server.asked) == 1001:
            break
    assert not server.wire.paused


def test_head_and_body_leave_together(server):
    server.say(WHOLE)
    server.let_answer()
    assert server.wire.writes == 1


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    ],
)
def test_a_refused_head_has_the_status_of_its_reason(server, request_bytes, status):
    server.say(request_bytes)
    assert server.wire.written.startswith(b"HTTP/1.1 %d " % status)
    assert server.asked == []


def test_a_header_line_without_an_end_is_not_collected(server):
    server.say(HALF)
    for _ in range(70):
        server.say(b"a" * 1000)
    assert server.wire.written.startswith(b"HTTP/1.1 431 ")


def test_of_many_requests_that_are_refused_at_once_one_is_answered_each_time(server):
    async def arrive():
        server.connection.say(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        for _ in range(200):
            answered.append(server.wire.written.count(b"HTTP/1.1 400 "))
            await asyncio.sleep(0)

    def refuse(cycle, _body):
        cycle.reply(Reply(400, [(b"content-length", b"0")], b""))
        return True

    answered = []
    server.connection.protocol = FrontProtocol(server.connections, refuse)
    server.connection.protocol.connection_made(server.wire)
    server.loop.run_until_complete(arrive())
    assert answered[0] == 1
    assert answered[-1] == 100
    assert not server.wire.paused


def test_nothing_begins_while_nothing_can_be_written(server):
    server.loop.call_soon(server.connection.protocol.pause_writing)
    server.say(WHOLE)
    assert server.asked == []
    assert server.wire.paused
    server.loop.call_soon(server.connection.protocol.resume_writing)
    server.loop.run_until_complete(turn_over())
    assert server.asked == ["/"]
    assert not server.wire.paused


# --- accepting ------------------------------------------------------------------------------------


class Taken(asyncio.Protocol):
    """Notes the connections that are made."""

    def __init__(self, made):
        self.made = made

    def connection_made(self, transport):
        self.made.append(transport)


@pytest.fixture
def taken():
    return []


async def test_of_a_burst_it_takes_no_more_than_its_share_so_that_other_workers_get_theirs(taken):
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(40)]
        accepting = Listener(listener, Connections(None, OPTIONS, 1000), lambda: Taken(taken))
        accepting.open()
        while len(taken) < len(clients):
            before = len(taken)
            await asyncio.sleep(0)
            assert len(taken) <= before + 2, "about one per turn of the loop"
        accepting.close()
        for each in [*taken, *clients]:
            each.close()
        await asyncio.sleep(0)


async def test_it_accepts_again_when_the_system_has_descriptors_again(taken, monkeypatch, caplog):
    monkeypatch.setattr(module, "ACCEPT_AGAIN_S", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()):
        connections = Connections(None, OPTIONS, 1000)
        accepting = Listener(Exhausted(listener, 3), connections, lambda: Taken(taken))
        accepting.open()
        while not taken:
            await asyncio.sleep(0.01)
        taken[0].abort()
        accepting.close()
        await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted: Too many open files"
    ], "one line a minute"


class Exhausted:
    """A listening socket that has no descriptor to give, so many times."""

    def __init__(self, listener, times):
        self._listener = listener
        self._times = times
        self.setblocking = listener.setblocking
        self.fileno = listener.fileno

    def accept(self):
        if self._times:
            self._times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_a_worker_takes_as_many_connections_as_descriptors_leave_room_for():
    assert most_connections(1024) == 896
    assert most_connections(64) == 1
    assert most_connections(1_000_000) == most_connections(-1) == 57_344


def test_the_loop_is_uvloops_where_that_is_installed(loop):
    installed = importlib.util.find_spec("uvloop") is not None
    assert (type(loop).__module__ == "uvloop") is installed


# --- clients that send slowly, or a great many ----------------------------------------------------

BODY_TIMEOUT_S = OPTIONS.body_timeout_s
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n"


def test_a_body_that_lags_behind_500_bytes_a_second_is_abandoned(server):
    server.let_answer()
    server.say(POST)
    assert not server.is_closed_after(BODY_TIMEOUT_S - 1)
    assert not server.is_closed_after(BODY_TIMEOUT_S + 1)
    server.loop.run_until_complete(turn_over())
    assert server.wire.closed, "the app met an error"


def test_what_came_fast_gains_a_body_no_time_for_later():
    pace = Pace()
    pace.wait(0.0)
    pace.took(1_000_000, 1.0)
    assert pace.since == 1.0
    pace.took(500, 11.0)
    assert pace.since == 2.0
    pace.stop(12.0)
    assert pace.since is None
    pace.wait(100.0)
    assert pace.since == 90.0, "it had lagged 10 s behind when its time stood still"


async def test_to_make_room_the_slowest_request_goes_and_one_under_way_stays(monkeypatch):
    monkeypatch.setattr(module, "EVICTED", 1)

    async def reading(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await asyncio.Event().wait()

    connections = Connections(reading, OPTIONS, 3)
    three = [Conversation(reading, OPTIONS, connections=connections) for _ in range(3)]
    busy, fast, slow = three
    busy.say(WHOLE)
    for each in (fast, slow):
        each.say(POST)
        await turn_over()
    for _ in range(5):
        await asyncio.sleep(0.01)
        fast.say(b"x" * 1000)
        await turn_over()
    assert connections.has_room()
    assert [each.wire.closed for each in three] == [False, False, True]
    assert slow.wire.written.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in slow.wire.written
    for each in three:
        each.protocol.connection_lost(None)
    await busy.end()


async def accepted(options, sources):
    """Return which of the clients, by their addresses, are accepted, and the worker's count."""
    connections = Connections(None, options, 100)
    make = partial(FrontProtocol, connections)
    answers = []
    with socket.create_server(("0.0.0.0", 0)) as listening, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", listening.getsockname()[1])
        listener = Listener(listening, connections, make)
        listener.open()
        for source in sources:
            before = len(connections.all)
            client = stack.enter_context(
                socket.create_connection(address, source_address=(source, 0))
            )
            client.setblocking(False)
            while len(connections.all) == before:
                await asyncio.sleep(0.001)
                with contextlib.suppress(BlockingIOError):
                    answers.append(client.recv(100)[:12])
                    break
        listener.close()
        while connections.all:
            for connection in [each for each in connections.all if each.opening is None]:
                connection.evict()
            await asyncio.sleep(0.001)
    return answers, connections


async def test_an_address_has_its_share_of_connections_and_a_trusted_proxy_any(caplog):
    options = HTTPOptions(max_connections_per_client=2, trusted_proxies=["127.0.0.4"])
    sources = ["127.0.0.2"] * 4 + ["127.0.0.3"] * 2 + ["127.0.0.4"] * 5
    answers, connections = await accepted(options, sources)
    assert answers == [b"HTTP/1.1 503"] * 2
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 1
    assert "127.0.0.2 are refused (max_connections_per_client" in found[0]
    again = connections.has_room(("127.0.0.2", 1))
    assert again, "they are gone"


async def test_a_connection_counts_once_while_it_comes_to_be_open():
    connections = Connections(None, HTTPOptions(max_connections_per_client=2), 2)
    made, peer = FrontProtocol(connections), ("10.0.0.1", 7)
    connections.open(made, asyncio.Future(), peer)
    connections.add(made, peer)  # before the future is done
    assert connections.has_room(("10.0.0.1", 8))
    connections.remove(made)
    assert not connections.all


async def test_the_pages_own_port_has_room_that_requests_cannot_take():
    connections = Connections(None, OPTIONS, 4)
    for number in range(4):
        connections.open(FrontProtocol(connections), asyncio.Future(), (f"10.0.0.{number}", 1))
    assert not connections.has_room(("10.0.0.9", 1))
    for _ in range(module.PAGES_ROOM):
        assert connections.has_room(("10.0.0.9", 1), for_pages=True)
        connections.open(FrontProtocol(connections), asyncio.Future(), ("10.0.0.9", 1))
    assert not connections.has_room(("10.0.0.9", 1), for_pages=True)


@pytest.mark.parametrize(
    ("limits", "statuses"),
    [
        ({}, [b"414", b"", b"414"]),  # of a header that has no end yet nothing is known
        ({"max_target_bytes": 20_001, "max_header_bytes": 70_001}, [b"", b"", b""]),
    ],
)
async def test_targets_and_headers_are_limited_by_settings(limits, statuses):
    written = []
    for target, header in ((5000, 1), (1, 9000), (20_000, 70_000)):
        conversation = Conversation(None, HTTPOptions(**limits))
        head = b"GET /%b HTTP/1.1\r\nHost: a\r\nX: %b" % (b"a" * target, b"a" * header)
        for at in range(0, len(head), 1000):
            conversation.say(head[at : at + 1000])
        written.append(conversation.wire.written[9:12])
        await conversation.end()
    assert written == statuses


async def test_a_headers_name_counts_to_its_limit():
    written = []
    for size in (50, 51):
        conversation = Conversation(None, HTTPOptions(max_header_bytes=100))
        header = b"N" * size + b": " + b"a" * 50
        conversation.say(b"GET / HTTP/1.1\r\n" + header + b"\r\nHost: x\r\n")
        written.append(conversation.wire.written[9:12])
        await conversation.end()
    assert written == [b"", b"431"]


async def test_without_a_setting_the_share_is_a_quarter():
    connections = Connections(None, OPTIONS, 8)
    waiting = [asyncio.Future() for _ in range(2)]
    for each in waiting:
        assert connections.has_room(("10.0.0.1", 1))
        connections.open(FrontProtocol(connections), each, ("10.0.0.1", 1))
    assert not connections.has_room(("10.0.0.1", 1))
    assert connections.has_room(("10.0.0.2", 1))
    waiting[0].cancel()  # a handshake, say
    await turn_over()
    assert connections.has_room(("10.0.0.1", 1))


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db9::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.2", "10.0.0.1", False),
    ],
)
def test_an_ipv6_client_is_its_network_and_ipv4_is_itself_in_either_form(first, second, is_same):
    clients = ClientCounts(1)
    clients.add(first)
    assert clients.has_room_for(second) is not is_same
    clients.remove(first)
    assert clients.has_room_for(second)
    assert TrustedProxies(["10.0.0.0/8"]).trusts("::ffff:10.0.0.1")


# --- clients that leave while nothing is read of their connections --------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_leaves_amid_a_body_is_noticed_though_it_is_not_read(
    server, pair, until, how
):
    near, far = pair
    server.wire.socket.fileno = near.fileno
    server.say(POST + b"x" * 300_000)
    assert server.wire.paused
    assert not server.is_closed_after(0)
    if how == "reset":
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        far.shutdown(socket.SHUT_WR)
    else:
        far.close()
    until("the client has left", lambda: server.is_closed_after(0))


def test_of_a_client_that_is_read_its_end_is_awaited(server, pair, until):
    near, far = pair
    server.wire.socket.fileno = near.fileno
    server.say(POST)
    far.close()
    until("the client has left", lambda: has_left(near.fileno()))
    assert not server.is_closed_after(0), "all that it has sent comes first"


@pytest.fixture
def pair():
    """Give both ends of a TCP connection; what the second has sent is never read."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        far = socket.create_connection(listening.getsockname())
        near, _ = listening.accept()
    with near, far:
        far.sendall(b"x" * 1000)
        yield near, far


# --- what is believed of X-Forwarded-For and X-Forwarded-Proto ------------------------------------

PROXY = ("127.0.0.1", 5000)


def client_and_scheme(*headers, trusted=("127.0.0.1", "::1", "10.0.0.0/8"), client=PROXY):
    return TrustedProxies(trusted).client_behind(client, list(headers))


def hops(value):
    return (b"x-forwarded-for", value)


@pytest.mark.parametrize(
    ("value", "client"),
    [
        (b"9.9.9.9", ("9.9.9.9", 0)),
        (b"1.1.1.1, 9.9.9.9", ("9.9.9.9", 0)),
        (b"9.9.9.9, 10.1.2.3, 127.0.0.1", ("9.9.9.9", 0)),
        (b"10.0.0.1, 10.0.0.2", ("10.0.0.1", 0)),
        (b"9.9.9.9:77", ("9.9.9.9", 77)),
        (b"2001:db8::1", ("2001:db8::1", 0)),
        (b"[2001:db8::1]:77", ("2001:db8::1", 77)),
        (b" 9.9.9.9 ", ("9.9.9.9", 0)),
        (b"9.9.9.9:" + b"7" * 5000, ("9.9.9.9", 0)),
        *(
            (each, PROXY)
            for each in (
                b"",
                b"unknown",
                b"\xc3\xa9",
                b'","forged":"yes',
                b"9.9.9.9, \x1b[2J",
                b"1.2.3",
                b",",
            )
        ),
    ],
)
def test_the_client_is_the_last_hop_that_is_no_proxy(value, client):
    assert client_and_scheme(hops(value))[0] == client


def test_no_more_hops_are_read_than_the_limit():
    proxies = b", 10.0.0.1" * (MAX_HOPS - 1)
    assert client_and_scheme(hops(b"9.9.9.9" + proxies))[0] == ("9.9.9.9", 0)
    assert client_and_scheme(hops(b"9.9.9.9, 10.0.0.2" + proxies))[0] == PROXY


@pytest.mark.parametrize(
    ("value", "scheme"),
    [(b"https", "https"), (b"wss", "wss"), (b"gopher", ""), (b"", "")],
)
def test_the_scheme_is_one_of_https_or_stays(value, scheme):
    assert client_and_scheme((b"x-forwarded-proto", value))[1] == scheme


def test_a_stranger_is_not_believed_unless_everybody_is():
    said = hops(b"9.9.9.9"), hops(b"10.0.0.1"), (b"x-forwarded-proto", b"https")
    stranger = ("8.8.8.8", 1)
    assert client_and_scheme(*said) == (("9.9.9.9", 0), "https")
    assert client_and_scheme(*said, client=stranger) == (stranger, "")
    assert client_and_scheme(*said, client=None) == (None, "")
    assert client_and_scheme(*said, client=stranger, trusted=["*"]) == (("9.9.9.9", 0), "https")
