"""The address of the HTTP front: as this host reaches it, and as status shows it."""

import pytest

from greenroom.actors.host.front import shown_url, url_of
from greenroom.actors.runtime.settings import read_settings


@pytest.mark.parametrize(
    ("given", "reached", "shown"),
    [
        ({}, "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ({"HTTP_HOST": "0.0.0.0"}, "http://127.0.0.1:8000", "http://0.0.0.0:8000"),
        ({"HTTP_HOST": "::"}, "http://[::1]:8000", "http://[::]:8000"),
        ({"HTTP_HOST": "::1"}, "http://[::1]:8000", "http://[::1]:8000"),
        (
            {"HTTP_HOST": "0.0.0.0", "BIND": "10.0.0.1", "ADVERTISE": "192.0.2.1"},
            "http://127.0.0.1:8000",
            "http://192.0.2.1:8000",
        ),
        (
            {"HTTP_HOST": "10.0.0.9", "BIND": "10.0.0.1"},
            "http://10.0.0.9:8000",
            "http://10.0.0.9:8000",
        ),
    ],
)
def test_a_front_at_all_addresses_is_shown_at_the_hosts_own(given, reached, shown):
    settings = read_settings({f"GREENROOM_{name}": value for name, value in given.items()})
    assert (url_of(settings), shown_url(settings)) == (reached, shown)
