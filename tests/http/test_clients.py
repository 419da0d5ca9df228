"""Clients of every kind against a real worker: well-behaved, hasty, broken and hostile ones."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.timing import check_within

MANY = 50


def test_fifty_clients_at_once_each_get_their_own_answer(front):
    with ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(lambda n: front.ask(f"/echo/{n}").json["path"], range(MANY)))
    assert answers == [f"/echo/{number}" for number in range(MANY)]


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
        until("the query is cancelled", lambda: front.ask("/seen").json["cancelled"] == before + 1)
        return time.monotonic() - left_at

    check_within(limit_s, attempt)
    assert front.logged("/hang")["status"] == 499


def test_the_log_has_a_line_for_each_request(front):
    answer = front.ask("/echo/logged?secret=1", "PUT", body=b"x")
    entry = front.logged("/echo/logged")
    assert entry["request_id"] == answer["x-request-id"]
    assert (entry["method"], entry["status"], entry["bytes"]) == ("PUT", 200, len(answer.body))
    assert entry["client"].startswith("127.0.0.1:")
    assert entry["duration_ms"] >= 0


def test_a_client_gone_before_its_large_answer_does_not_disturb_others(front):
    with front.connect() as connection:
        connection.sendall(b"GET /large/50000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100)
    assert front.ask("/echo").status == 200


def test_none_of_this_put_a_traceback_on_stderr(front):
    assert front.ask("/echo").status == 200
    assert "Traceback" not in front.stderr_path.read_text()
