"""Which connections the worker's event loop gives up on."""

import importlib.util

import pytest

from understudy.http_front.worker import FrontLoop


class Connection:
    def __init__(self, *, awaiting, requests):
        self._awaiting_request = awaiting
        self.req_count = requests
        self.closed = False

    def _keepalive_timeout(self):
        self.closed = True


@pytest.fixture
def loop():
    loop = FrontLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("connection", "served_too", "age_s", "closed"),
    [
        (Connection(awaiting=True, requests=1), False, 31, True),
        (Connection(awaiting=True, requests=1), False, 29, False),
        (Connection(awaiting=True, requests=2), False, 31, False),
        (Connection(awaiting=True, requests=2), True, 0, True),
        (Connection(awaiting=True, requests=1), True, 29, False),
        (Connection(awaiting=False, requests=1), True, 31, False),
        (Connection(awaiting=False, requests=2), True, 31, False),
    ],
)
def test_only_connections_without_a_request_are_closed(loop, connection, served_too, age_s, closed):
    loop.accepted[connection] = loop.time() - age_s
    loop.close_idle(served_too=served_too, older_than_s=30)
    assert connection.closed is closed


def test_a_connection_that_is_gone_is_forgotten(loop):
    connection = Connection(awaiting=True, requests=1)
    loop.accepted[connection] = 0.0
    del connection
    assert not loop.accepted


def test_the_loop_is_uvloops_where_that_is_installed(loop):
    installed = importlib.util.find_spec("uvloop") is not None
    assert (type(loop).__mro__[1].__module__ == "uvloop") is installed
