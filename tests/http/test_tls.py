"""HTTPS, and those that never finish its handshake."""

import contextlib
import ssl

import pytest

from tests.http.conftest import FILES, MANY, FrontProcess
from tests.http.doubtful import OPENING
from tests.http.wire import head
from tests.support.asking import statuses
from tests.support.certificates import certificate


class Https:
    """A front with HTTPS; its own health is asked for over TLS."""

    def __init__(self, front, authority):
        self.front = front
        self.context = ssl.create_default_context(cafile=authority)
        self.context.check_hostname = False

    def connect(self):
        plain = self.front.connect()
        return self.context.wrap_socket(plain)

    def exchange(self, request):
        received = b""
        with contextlib.suppress(ConnectionError), self.connect() as connection:
            connection.sendall(request)
            while piece := connection.recv(65536):
                received += piece
        return received

    def health(self):
        return statuses(self.exchange(head(b"GET", b"/-/healthz", b"Connection: close")))


@pytest.fixture
def https(tmp_path, until):
    made = certificate(tmp_path, "localhost")
    front = FrontProcess(
        tmp_path,
        GREENROOM_HTTP_SSL_CERTFILE=str(made.certificate),
        GREENROOM_HTTP_SSL_KEYFILE=str(made.key),
        GREENROOM_HTTP_HEADER_TIMEOUT_S="3",
    )
    served = Https(front, made.ca)
    until("it answers", lambda: served.health() == [200])
    yield served
    front.stop()


def test_requests_bodies_and_openings_are_served(https):
    body = b"x" * 300_000
    request = head(b"POST", b"/echo", b"Content-Length: %d" % len(body)) + body
    received = https.exchange(request + head(b"GET", b"/second", b"Connection: close"))
    assert statuses(received) == [200, 200]
    assert b'"body_size": 300000' in received
    assert statuses(https.exchange(head(b"GET", b"/plain", *OPENING))) == [200]
    assert statuses(https.exchange(head(b"GET", b"/plain", *OPENING[:2]))) in ([400], [426])
    received = https.exchange(head(b"GET", b"/large/3000000", b"Connection: close"))
    assert received.endswith(b"x" * 3_000_000)


def test_a_handshake_that_never_comes_is_abandoned(https):
    with https.front.connect() as silent:
        assert silent.recv(100) == b""
    with https.front.connect() as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b" 200 " not in plain.recv(100)
    assert https.health() == [200]
    assert "Traceback" not in https.front.stderr_path.read_text()


def test_however_many_never_finish_it_health_is_reachable(https):
    https.front.limit_files(FILES)
    assert https.health() == [200]
    with contextlib.ExitStack() as stack:
        for _ in range(MANY):
            stack.enter_context(https.front.connect())
        for _ in range(3):
            assert https.health() == [200]
