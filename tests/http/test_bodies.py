"""Request bodies, which go past the parser, cut anywhere: chunks, and large ones."""

import asyncio
import random

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.core.config import HTTPOptions
from greenroom.http_front.bodies import MOST_CHUNKS, WHOLE, ChunkedBody, RefusedRequestError
from greenroom.http_front.connections import Connections
from greenroom.http_front.protocol import AHEAD, LARGE, MOST_READ, READ
from tests.http.doubtful import BROKEN, chunked
from tests.http.wire import Conversation, respond, turn_over

pytestmark = pytest.mark.anyio

BEHIND = b"GET /next HTTP/1.1\r\n"


def read(data, cuts=(), most=100):
    """Return the body and what lies behind it, or None where the end has not come."""
    body, pieces, start = ChunkedBody(most), [], 0
    for end in [*sorted(cuts), len(data)]:
        segment = data[start:end]
        taken = body.take(segment, pieces)
        if body.is_complete:
            return b"".join(pieces), data[start + taken :]
        assert taken == len(segment)
        start = end
    return None


sizes = st.builds(
    lambda size, zeros, upper: (b"0" * zeros + (b"%X" if upper else b"%x") % size, size),
    st.integers(1, 300),
    st.integers(0, 5),
    st.booleans(),
)
extensions = st.sampled_from([b"", b";", b";a", b";a=b", b';a="b;c"', b"; a = \xff"])
trailers = st.lists(st.sampled_from([b"A: b\r\n", b"X-Long: " + b"y" * 50 + b"\r\n"]), max_size=1)


@given(
    chunks=st.lists(st.tuples(sizes, extensions), max_size=4),
    last=st.tuples(st.sampled_from([b"0", b"000"]), extensions, trailers),
    cuts=st.sets(st.integers(0, 1500), max_size=20),
)
def test_a_body_is_the_same_however_it_is_cut(chunks, last, cuts):
    data, expected = b"", b""
    for (line, size), extension in chunks:
        content = bytes(range(256))[:size] * 2
        content = content[:size] if len(content) >= size else content.ljust(size, b"\r")
        data += line + extension + b"\r\n" + content + b"\r\n"
        expected += content
    end, extension, ends = last
    data += end + extension + b"\r\n" + b"".join(ends) + b"\r\n" + BEHIND
    cuts = {cut for cut in cuts if cut < len(data) - len(BEHIND)}
    assert read(data, cuts) == (expected, BEHIND)


@pytest.mark.parametrize("data", BROKEN)
def test_what_is_none_is_refused_at_once_and_byte_by_byte(data):
    for cuts in ((), range(len(data))):
        with pytest.raises(RefusedRequestError) as raised:
            read(data, cuts)
        assert raised.value.status == 400


@pytest.mark.parametrize("data", [b"A: " + b"b" * 98, b"A: b\r\n" * 17])
def test_trailers_have_a_limit(data):
    for cuts in ((), range(3 + len(data))):
        with pytest.raises(RefusedRequestError, match="the trailers have over") as raised:
            read(b"0\r\n" + data, cuts)
        assert raised.value.status == 431


def test_what_has_not_come_to_its_end_is_waited_for():
    whole = b"1;a\r\na\r\n0\r\nA: b\r\n\r\n"
    for end in range(len(whole)):
        assert read(whole[:end]) is None


# --- large ones, on a connection ------------------------------------------------------------------

OPTIONS = HTTPOptions(max_waiting_body_bytes=2**28)
NEXT = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"


class Server:
    """One connection; its app answers with the size of the body, after or before it has read it."""

    def __init__(self, *, reads=True):
        self.reads = reads
        self.bodies = {}
        self.parts = []
        self.connection = Conversation(self.answer, OPTIONS)
        self.connections, self.wire = self.connection.connections, self.connection.wire

    async def answer(self, scope, receive, send):
        body, more = b"", self.reads
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                self.bodies[scope["path"]] = None
                return
            assert type(event["body"]) is bytes
            self.parts.append(len(event["body"]))
            body, more = body + event["body"], event["more_body"]
        self.bodies[scope["path"]] = body
        await respond(send, b"%d" % len(body))


def request(path, body):
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    return head % (path, len(body)) + body


def chunked_upgrade(path, body):
    """Return what is read in the same way, though it asks for another protocol and has trailers."""
    head = (
        b"\r\nPOST %s HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: foo\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    pieces = [body[at : at + AHEAD] for at in range(0, len(body), AHEAD)]
    chunks = b"".join(b"%x;a\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head % path + chunks + b"0\r\nHost: b\r\n\r\n"


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * AHEAD]),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 4 * AHEAD) | st.integers(0, 300), max_size=6),
    gives_turns=st.booleans(),
    coded=st.sets(st.integers(0, 2)),
)
@settings(max_examples=60)
async def test_bodies_and_the_requests_behind_them_arrive_however_they_are_cut(
    sizes, cuts, gives_turns, coded
):
    bodies = [random.Random(size).randbytes(size) for size in sizes]
    forms = [chunked_upgrade if n in coded else request for n in range(len(bodies))]
    sent = b"".join(form(b"/%d" % n, bodies[n]) for n, form in enumerate(forms)) + NEXT
    ends = sorted({cut for cut in cuts if cut < len(sent)} | {len(sent)})

    server, start = Server(), 0
    for end in ends:
        server.connection.say(sent[start:end])
        start = end
        if gives_turns:
            await turn_over()
    for _ in range(2):
        await turn_over()
    assert not server.wire.closed
    assert server.connections.waiting_bytes == 0
    await server.connection.end()
    assert server.bodies == {f"/{n}": body for n, body in enumerate(bodies)} | {"/next": b""}
    assert server.wire.written.count(b"HTTP/1.1 200 ") == len(bodies) + 1


async def test_what_comes_when_it_is_waited_for_is_passed_on_as_it_came():
    server = Server()
    body = b"x" * (4 * LARGE)
    sent = request(b"/", body)
    server.connection.say(sent[: -len(body)])
    for start in range(0, len(body), LARGE):
        await turn_over()
        server.connection.say(body[start : start + LARGE])
    await turn_over()
    await server.connection.end()
    assert server.parts == [LARGE] * 4


async def test_of_a_great_many_chunks_some_are_read_at_once_and_others_have_their_turn():
    server = Server()
    server.connection.say(chunked(b"1\r\nx\r\n" * 5 * MOST_CHUNKS + b"0\r\n\r\n") + NEXT)
    while "/next" not in server.bodies:
        await asyncio.sleep(0)
    await server.connection.end()
    assert server.bodies["/first"] == b"x" * 5 * MOST_CHUNKS
    assert max(server.parts) <= MOST_CHUNKS


async def test_while_much_of_it_is_not_taken_no_more_is_read():
    server = Server()
    body = b"x" * (8 * AHEAD)
    server.connection.say(request(b"/", body)[: -len(body)])
    for _ in range(2):
        assert not server.wire.paused
        server.connection.say(b"x" * AHEAD)
    assert server.wire.paused
    await turn_over()
    assert not server.wire.paused
    await server.connection.end()


async def test_more_is_read_at_once_while_all_of_it_is_taken_and_as_ever_behind_it():
    server = Server()
    server.wire.max_size = READ
    body = b"x" * (4 * AHEAD)
    sent = request(b"/", body)
    server.connection.say(sent[: -len(body) + 1])
    server.connection.say(body[:AHEAD])
    assert server.wire.max_size == READ, "nobody has taken the first byte"
    await turn_over()
    server.connection.say(body[:AHEAD])
    assert server.wire.max_size == MOST_READ
    server.connection.say(body[: 2 * AHEAD - 1])
    assert server.wire.max_size == READ
    await turn_over()
    await server.connection.end()
    assert server.bodies == {"/": b"x" * (4 * AHEAD)}


async def test_what_is_left_of_a_body_behind_its_answer_is_dropped_and_the_next_request_is_served():
    server = Server(reads=False)
    sent = request(b"/", b"x" * (4 * AHEAD))
    server.connection.say(sent[:100])
    await turn_over()
    assert server.wire.written.startswith(b"HTTP/1.1 200 ")
    for start in range(100, len(sent), AHEAD):
        server.connection.say(sent[start : start + AHEAD])
    assert not server.wire.paused
    assert server.connections.waiting_bytes == 0
    server.connection.say(NEXT)
    await turn_over()
    await server.connection.end()
    assert list(server.bodies) == ["/", "/next"]


async def test_a_body_is_not_refused_for_want_of_room_once_its_response_has_begun():
    async def answer(_scope, receive, send):
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        assert await receive() == {"type": "http.request", "body": b"x", "more_body": False}
        await send({"type": "http.response.body", "body": b"k"})

    talk = Conversation(answer, OPTIONS)
    sent = request(b"/", b"x")
    talk.say(sent[:-1])
    await turn_over()
    talk.connections.waiting_bytes = OPTIONS.max_waiting_body_bytes  # of others
    talk.say(sent[-1:])
    await turn_over()
    assert talk.wire.written.endswith(b"\r\n\r\nok")
    await talk.end()


@pytest.mark.parametrize(
    ("came", "length"),
    [(0, 2 * OPTIONS.max_waiting_body_bytes), (LARGE, 4 * AHEAD), (WHOLE + 1, 2 * WHOLE)],
)
async def test_a_client_that_leaves_amid_it_is_reported(came, length):
    server = Server()
    head = request(b"/", b"").replace(b"Length: 0", b"Length: %d" % length)
    server.connection.say(head + b"x" * came)
    await turn_over()
    assert server.connections.waiting_bytes == min(came, WHOLE)
    assert not server.wire.written, "what follows a query needs no room"
    await server.connection.end()
    await turn_over()
    assert server.bodies in ({"/": None}, {})  # its task is cancelled while it waits
    assert server.connections.waiting_bytes == 0


@pytest.mark.parametrize("form", [request, chunked_upgrade])
async def test_bodies_that_wait_have_a_budget(form, caplog):
    gate = asyncio.Event()

    async def answer(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await gate.wait()
        await respond(send)

    options = HTTPOptions(max_waiting_body_bytes=5 * 2**20)
    connections = Connections(answer, options, 100)
    talks = [Conversation(answer, options, connections=connections) for _ in range(8)]
    for talk in talks:
        talk.say(form(b"/", bytes(1_000_000)))
        await turn_over()
    answers = [talk.wire.written for talk in talks]
    assert answers[:5] == [b""] * 5
    for refused in answers[5:]:
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refused
        assert b"no room" in refused
    assert [record.getMessage().count("max_waiting_body_bytes") for record in caplog.records] == [1]
    gate.set()
    await turn_over()
    assert all(b" 200 " in talk.wire.written for talk in talks[:5])
    assert connections.waiting_bytes == 0
    for talk in talks:
        await talk.end()
