"""What clients can make a worker keep, and for how long."""

import contextlib
import os
import time

import psutil
import pytest

from greenroom.http_front.connections import LOG_EVERY_S
from tests.http.conftest import FILES, MANY
from tests.http.doubtful import OPENING
from tests.http.wire import head
from tests.support.asking import statuses
from tests.support.timing import check_within

MIB = 1024 * 1024
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


def read_all(connection):
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(MIB):
            received += piece
    return received


# --- connections ----------------------------------------------------------------------------------


@pytest.fixture
def few_files(start_front):
    """Give a front whose worker may have FILES files open."""
    front = start_front(GREENROOM_HTTP_HEADER_TIMEOUT_S="60")
    front.limit_files(FILES)
    assert front.ask("/echo").status == 200
    return front


WAITING = {
    "silent": b"",
    "half of a head": b"GET / HTTP/1.1\r\nHost: x\r\nX-Half",
    "kept": GET % b"kept",
    "openings with a length": head(b"GET", b"/", *OPENING, b"Content-Length: 5"),
    "failing openings": head(b"GET", b"/", *OPENING[:3]),
    "half of a body": head(b"POST", b"/", b"Content-Length: 5") + b"x",
    "half of a large body": head(b"POST", b"/", b"Content-Length: 10000000") + b"x",
    "half of a body in chunks": head(b"POST", b"/hang", b"Transfer-Encoding: chunked") + b"5\r\nx",
}


@pytest.mark.slow
def test_however_many_connections_wait_health_is_reachable(few_files):
    (worker,) = few_files.workers()
    began = time.monotonic()
    for name, sent in WAITING.items():
        with contextlib.ExitStack() as stack:
            for _ in range(MANY):
                connection = stack.enter_context(few_files.connect())
                with contextlib.suppress(ConnectionError):
                    connection.sendall(sent)
            for _ in range(3):
                assert few_files.ask("/-/healthz").status == 200, name
            assert psutil.Process(worker).num_fds() < FILES
    lines = few_files.stderr_path.read_text().splitlines()
    minutes = 1 + (time.monotonic() - began) // LOG_EVERY_S
    assert 1 <= len([line for line in lines if "its most" in line]) <= minutes


def test_when_all_are_busy_another_is_refused_and_served_when_there_is_room(
    few_files, tmp_path, until
):
    gate = tmp_path / "gate"
    with contextlib.ExitStack() as stack:
        for _ in range(MANY):
            connection = stack.enter_context(few_files.connect())
            with contextlib.suppress(ConnectionError):
                connection.sendall(GET % b"gate%b" % os.fsencode(gate))
        with few_files.connect() as another:
            assert statuses(read_all(another)) == [503]
        gate.touch()
    until("there is room", lambda: few_files.ask("/echo").status == 200)


def connections(worker):
    open_ones = psutil.Process(worker).net_connections("tcp")
    return [each for each in open_ones if each.status == psutil.CONN_ESTABLISHED]


def rss(front):
    return sum(psutil.Process(worker).memory_info().rss for worker in front.workers())


# --- clients that do not read ---------------------------------------------------------------------


def test_a_client_that_does_not_read_its_answer_is_cut(start_front, until):
    front = start_front(GREENROOM_HTTP_SEND_TIMEOUT_S="2")
    (worker,) = front.workers()
    with front.connect() as deaf, front.connect() as slow:
        deaf.sendall(GET % b"large/50000000")
        slow.sendall(GET % b"large/3000000")
        received = b""
        while len(received) < 3_000_000:  # for longer than the limit
            received += slow.recv(60_000)
            time.sleep(0.05)
        until("only the slow one is left", lambda: len(connections(worker)) == 1)
        assert len(read_all(deaf)) < 50_000_000


def test_pipelined_answers_that_are_not_read_hold_up_the_requests(start_front, until):
    front = start_front()
    with front.connect() as deaf:
        deaf.settimeout(0.5)
        with pytest.raises(TimeoutError):
            deaf.sendall((GET % b"large/100000") * 400_000)  # 16 MB, for 40 GB of answers
        seen = [front.ask("/seen").json["asked"]]
        until(
            "they are held up",
            lambda: seen.append(front.ask("/seen").json["asked"]) or seen[-1] == seen[-2] + 1,
        )
        assert rss(front) < 200 * MIB


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behind", "limit_s"),
    [
        (b"", 0.1),
        # Nothing is read behind a request that is open, so the look once a second finds out.
        (b"GET /behind HTTP/1.1\r\nHost: x\r\n\r\n", 1.2),
    ],
)
def test_a_client_that_leaves_cancels_its_query_at_once_or_at_the_next_check(
    front, until, behind, limit_s
):
    def attempt():
        seen = front.ask("/seen").json
        before, asked = seen["cancelled"], seen["asked_paths"].count("/hang")
        with front.connect() as connection:
            connection.sendall(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n" + behind)
            until(
                "the query is asked",
                lambda: front.ask("/seen").json["asked_paths"].count("/hang") == asked + 1,
            )
            left_at = time.monotonic()

        def cancelled():
            seen = front.ask("/seen").json
            return seen["cancelled"] == before + 1 and seen

        return until("the query is cancelled", cancelled)["cancelled_at"] - left_at

    check_within(limit_s, attempt)
    assert front.logged("/hang")["status"] == 499
