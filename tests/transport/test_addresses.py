"""Addresses as values."""

import pickle
from contextlib import closing

import pytest

from greenroom.actors.transport.addresses import (
    LAST_PORT,
    ProcessAddress,
    admin_address,
    drawn_address,
    host_of_admin,
    parse_address,
)
from greenroom.actors.transport.sockets import local_listener
from tests.support.systems import free_port


def test_they_are_values():
    address, same = ProcessAddress("127.0.0.1", 1900), ProcessAddress("127.0.0.1", 1900)
    assert len({address, same}) == 1
    assert address not in {ProcessAddress("127.0.0.1", 1901), "127.0.0.1:1900"}
    drawn = drawn_address("127.0.0.1")
    assert pickle.loads(pickle.dumps(drawn, 5)) == parse_address(drawn.text) == drawn


def test_drawn_numbers_are_no_ports_and_do_not_repeat():
    numbers = {drawn_address("127.0.0.1").number for _ in range(1000)}
    assert len(numbers) == 1000
    assert min(numbers) > LAST_PORT


@pytest.mark.parametrize("text", ["", "1900", ":1900", "host:", "host:x", "host:-1", "host:٣"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="no address"):
        parse_address(text)


@pytest.mark.parametrize("where", ["", "localhost:1900", "127.0.0.1", "127.0.1.1:1900", ("", 1900)])
def test_every_name_of_this_host_is_one_address(where, monkeypatch):
    monkeypatch.delenv("GREENROOM_BIND", raising=False)
    assert admin_address(where) == ProcessAddress("127.0.0.1", 1900)


def test_this_host_is_known_by_the_address_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("GREENROOM_BIND", "10.1.2.3")
    assert admin_address("localhost:7") == ProcessAddress("10.1.2.3", 7)


def test_other_loopback_addresses_are_hosts_of_their_own(monkeypatch):
    monkeypatch.setenv("GREENROOM_BIND", "127.0.0.2")
    assert admin_address("127.0.0.3:7") == ProcessAddress("127.0.0.3", 7)
    assert admin_address("127.0.0.1:7") == ProcessAddress("127.0.0.2", 7)


def test_a_drawn_address_ends_in_the_port_of_its_admin():
    address = drawn_address("10.0.0.1", 1900)
    assert (address.port, address.is_admin) == (1900, False)
    assert (ProcessAddress("10.0.0.1", 1900).port, ProcessAddress("h", 1900).is_admin) == (1900, 1)


def test_an_admin_is_found_without_knowing_to_which_address_it_is_bound(monkeypatch):
    monkeypatch.delenv("GREENROOM_BIND", raising=False)
    port = free_port()
    assert host_of_admin(port) == "127.0.0.1"
    with closing(local_listener(ProcessAddress("10.1.2.3", port).socket_name)):
        assert host_of_admin(port) == "10.1.2.3"
        assert host_of_admin(port - 1) == "127.0.0.1"
        with closing(local_listener(ProcessAddress("127.0.0.1", port).socket_name)):
            assert host_of_admin(port) == "127.0.0.1"
        monkeypatch.setenv("GREENROOM_BIND", "10.9.9.9")
        assert host_of_admin(port) == "10.9.9.9"


def test_the_socket_name_fits_and_leaves_nothing_on_disk():
    name = ProcessAddress("255.255.255.255", 2**49).socket_name
    assert name.startswith(b"\0greenroom-")
    assert len(name) <= 108
