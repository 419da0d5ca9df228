"""Calls that change an endpoint return when every proxy routes by the change, not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.runtime.port import CONTROLLER
from greenroom.core.long_poll import NOTHING_SEEN
from greenroom.serve.exceptions import GreenroomError
from tests.actors.by_hand import Hand
from tests.support.systems import RunningSystem


def hello() -> str:
    return "hello"


class ProxyByHand:
    """One more proxy, which takes its time."""

    def __init__(self, hand: Hand, process: m.Process) -> None:
        self.hand, self.process = hand, process
        self.controller = hand.locate(*CONTROLLER)
        self.seen = NOTHING_SEEN

    def listen(self) -> None:
        listen = cm.Listen(listener=self.process, host="", seen=self.seen)
        self.hand.send(self.controller, listen)

    def hear(self, key: str) -> Any:
        """Take news until there is some of the key; return it, without telling."""
        while True:
            changed = self.hand.wait_for(cm.Changed).message
            self.seen = changed.upto
            if key in changed.snapshots:
                return changed.snapshots[key][1]
            self.listen()

    def catch_up(self) -> None:
        """Take and confirm all that there is."""
        self.listen()
        self.seen = self.hand.wait_for(cm.Changed).message.upto
        self.listen()


@pytest.fixture
def second_proxy(own_system: RunningSystem) -> Iterator[ProxyByHand]:
    hand = Hand(own_system.settings.admin_port)
    yield ProxyByHand(hand, hand.process)
    hand.close()


@pytest.mark.slow
def test_a_change_of_an_endpoint_waits_for_the_slowest_proxy(
    own_system: RunningSystem, second_proxy: ProxyByHand
) -> None:
    client = serve.Client(own_system.connection, own_system.settings)
    client.wait_for_goal(client.create_backend("b", hello), 20)
    client.wait_for_goal(client.create_backend("c", hello), 20)
    second_proxy.catch_up()
    changes: list[tuple[Callable[[], Any], Callable[[Any], bool]]] = [
        (lambda: client.create_endpoint("e", backend="b", route="/e"), lambda t: t.route == "/e"),
        (lambda: client.create_endpoint("e", backend="b", route="/e"), lambda t: True),
        (lambda: client.set_traffic("e", {"c": 1.0}), lambda t: t.traffic == {"c": 1.0}),
        (lambda: client.shadow_traffic("e", "b", 0.5), lambda t: t.shadows == {"b": 0.5}),
        (lambda: client.delete_endpoint("e"), lambda t: t is None),
    ]
    for number, (change, is_so) in enumerate(changes):
        thread = threading.Thread(target=change)
        thread.start()
        if number != 1:  # the same call again: nothing new comes, and nothing is waited for
            assert is_so(second_proxy.hear("endpoint/e"))
            thread.join(0.2)
            assert thread.is_alive(), "one proxy has not said that it holds it"
            second_proxy.listen()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_proxy_that_is_silent_is_named_as_the_reason_after_a_while(
    own_system: RunningSystem, second_proxy: ProxyByHand
) -> None:
    client = serve.Client(own_system.connection, own_system.settings)
    client.wait_for_goal(client.create_backend("b", hello), 20)
    second_proxy.catch_up()
    with pytest.raises(GreenroomError, match="saved, but not every proxy has taken it yet"):
        client.create_endpoint("e", backend="b", route="/e")
    assert own_system.get("/e") == (200, b"hello"), "the others have"
