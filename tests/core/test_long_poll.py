"""What each listener is told, and when; and that many listeners cost little."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.core.agenda import Agenda
from greenroom.core.long_poll import IDS_PER_EPOCH, NOTHING_SEEN, PROXY_EXPECTED_S, LongPoll, Update
from greenroom.core.records import Changes
from tests.support.memory import growth


def new_poll(epoch: int = 1, *, closed: bool = False) -> LongPoll:
    return LongPoll(epoch, {}, Changes(), Agenda(), closed=closed)


def call(poll: LongPoll, name: str, seen: int) -> None:
    poll.listen(name, (1, 1, name), seen, name)


def listen(poll: LongPoll, name: str, seen: int) -> Update | None:
    """Return what a proxy is answered at once; others that wait lose what they are sent."""
    call(poll, name, seen)
    return dict(poll.take_updates()).get(name)


class Listener:
    """What a proxy does with news."""

    def __init__(self, name: str = "p") -> None:
        self.name = name
        self.seen = NOTHING_SEEN
        self.tables: dict[str, Any] = {}

    def take(self, update: Update) -> None:
        if update.complete:
            self.tables.clear()
        for key, (_, value) in update.snapshots.items():
            self.tables[key] = value
            if value is None:
                del self.tables[key]
        self.seen = update.upto

    def listen(self, poll: LongPoll) -> bool:
        """Listen until parked; return whether there was anything."""
        heard = False
        while (update := listen(poll, self.name, self.seen)) is not None:
            self.take(update)
            heard = True
        return heard


def values(update: Update | None) -> dict[str, Any]:
    assert update is not None
    return {key: value for key, (_, value) in update.snapshots.items()}


def test_updates_go_once_and_only_to_listeners_that_wait() -> None:
    poll, waiting, busy = new_poll(), Listener("p"), Listener("busy")
    waiting.listen(poll)
    busy.take(listen(poll, "busy", NOTHING_SEEN) or pytest.fail("a first listen is answered"))
    poll.publish("a", 1)
    assert [name for name, _ in poll.take_updates()] == ["p"]
    assert poll.take_updates() == []
    assert values(listen(poll, "busy", busy.seen)) == {"a": 1}


def test_publishing_the_same_value_is_no_update() -> None:
    poll, listener = new_poll(), Listener()
    poll.publish("a", [1])
    listener.listen(poll)
    poll.publish("a", [1])
    poll.publish("never there", None)
    assert poll.take_updates() == []
    assert poll.held_by_all("a")


@pytest.mark.parametrize("seen", [-1, 1, IDS_PER_EPOCH - 1, IDS_PER_EPOCH + 2, 2**70])
def test_a_listener_that_claims_an_id_that_was_never_given_gets_all(seen: int) -> None:
    poll = new_poll()
    poll.publish("a", 1)
    assert listen(poll, "p", seen) == Update(
        {"a": (IDS_PER_EPOCH + 1, 1)}, IDS_PER_EPOCH + 1, complete=True
    )
    assert not poll.held_by_all("a")


def test_a_key_is_held_when_all_have_said_that_they_hold_it() -> None:
    poll, first, second = new_poll(), Listener("p"), Listener("q")
    poll.publish("a", 1)
    first.take(listen(poll, "p", NOTHING_SEEN) or pytest.fail("a first listen is answered"))
    assert not poll.held_by_all("a"), "told, but not confirmed"
    first.listen(poll)
    assert poll.held_by_all("a")
    listen(poll, "q", second.seen)
    assert not poll.held_by_all("a")
    poll.gone("q")
    assert poll.held_by_all("a")
    poll.publish("b", 2)
    assert poll.held_by_all("a")
    assert not poll.held_by_all("b")


def test_a_proxy_whose_host_is_away_again_is_waited_for_as_long_again() -> None:
    poll = new_poll()
    call(poll, "p", NOTHING_SEEN)
    poll.reconcile("p", lambda _: False, 0.0)
    poll.reconcile("p", lambda _: True, PROXY_EXPECTED_S - 1)
    poll.reconcile("p", lambda _: False, PROXY_EXPECTED_S + 1)
    poll.reconcile("p", lambda _: False, 2 * PROXY_EXPECTED_S)
    assert poll.is_heard("p")
    poll.reconcile("p", lambda _: False, 2 * PROXY_EXPECTED_S + 1)
    assert not poll.is_heard("p")


def test_a_closed_long_poll_answers_when_it_is_opened() -> None:
    poll = new_poll(2, closed=True)
    poll.publish("a", 1)
    assert listen(poll, "p", IDS_PER_EPOCH + 7) is None
    assert listen(poll, "empty", NOTHING_SEEN) is None
    assert poll.take_updates() == []
    assert not poll.held_by_all("a")
    poll.open()
    update = dict(poll.take_updates())
    assert set(update) == {"p", "empty"}
    assert all(values(each) == {"a": 1} and each.complete for each in update.values())
    assert poll.take_updates() == []


def test_old_deletions_are_forgotten_and_a_listener_that_missed_them_gets_all() -> None:
    poll, listener = new_poll(), Listener()
    poll.publish("kept", 1)
    listener.listen(poll)
    old, update = listener.seen, None
    for number in range(5_000):
        poll.publish(f"k{number}", 1)
        poll.publish(f"k{number}", None)
        if number % 100 == 0:
            listener.listen(poll)
        if number == 900:
            update = listen(poll, "in time", old)
            poll.gone("in time")
    assert update is not None
    assert (len(update.snapshots), update.complete) == (901, False), "a thousand are remembered"
    assert poll.held_by_all("k1")
    update = listen(poll, "late", old)
    assert update is not None
    assert (values(update), update.complete) == ({"kept": 1}, True)


def test_deletions_that_a_listener_has_yet_to_hear_of_are_kept() -> None:
    poll, listener, silent = new_poll(), Listener(), Listener("silent")
    poll.publish("first", 1)
    silent.listen(poll)
    poll.publish("first", None)
    for number in range(3_000):
        poll.publish(f"k{number}", 1)
        poll.publish(f"k{number}", None)
        listener.listen(poll)
    update = listen(poll, "silent", silent.seen)
    assert update is not None
    assert values(update)["first"] is None
    assert not update.complete


class Lives(RuleBasedStateMachine):
    """Listeners lose news, restart and go; the controller restarts; in the end all is known."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.poll = new_poll()
        self.truth: dict[str, Any] = {}
        self.listeners = {name: Listener(name) for name in "pqr"}
        self.known: set[str] = set()  # that the controller has heard of

    @rule(key=st.sampled_from("abc"), value=st.sampled_from([None, 1, 2]))
    def publish(self, key: str, value: Any) -> None:
        self.poll.publish(key, value)
        self.truth[key] = value

    @rule(name=st.sampled_from("pqr"))
    def listen(self, name: str) -> None:
        self.known.add(name)
        call(self.poll, name, self.listeners[name].seen)

    @rule(lost=st.sets(st.sampled_from("pqr")))
    def push(self, lost: set[str]) -> None:
        for name, update in self.poll.take_updates():
            if name not in lost:
                self.listeners[name].take(update)

    @rule(name=st.sampled_from("pqr"))
    def restart_listener(self, name: str) -> None:
        self.poll.gone(name)
        self.known.discard(name)
        self.listeners[name] = Listener(name)

    @rule(closed=st.booleans())
    def restart_controller(self, closed: bool) -> None:
        self.epoch += 1
        self.known.clear()
        self.poll = new_poll(self.epoch, closed=closed)
        for key, value in self.truth.items():
            self.poll.publish(key, value)

    @rule()
    def open(self) -> None:
        self.poll.open()

    @invariant()
    def what_is_said_to_be_held_is_held(self) -> None:
        for key, value in self.truth.items():
            if self.poll.held_by_all(key):
                for name in self.known:
                    assert self.listeners[name].tables.get(key) == value

    def teardown(self) -> None:
        self.poll.open()
        for listener in self.listeners.values():
            listener.listen(self.poll)
            assert listener.tables == {k: v for k, v in self.truth.items() if v is not None}
        assert all(self.poll.held_by_all(key) for key in self.truth)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40)


def test_memory_does_not_grow_with_what_was_published_and_heard() -> None:
    poll, listener = new_poll(), Listener()
    listen(poll, "silent", NOTHING_SEEN)

    def publish_and_hear(times: int) -> None:
        for number in range(times):
            poll.publish("a", number)
            listener.listen(poll)

    publish_and_hear(1_000)
    assert growth(lambda: publish_and_hear(10_000)) < 100_000


def test_thousands_of_listeners_cost_an_entry_each() -> None:
    """With 10,000 keys: what a heartbeat or a change costs must not follow their number."""
    poll = new_poll()
    for number in range(10_000):
        poll.publish(f"k{number}", number)
    names = [f"l{number}" for number in range(5_000)]
    everything = listen(poll, names[0], NOTHING_SEEN)
    assert everything is not None
    began = time.process_time()  # others may have the processor
    for name in names:
        assert listen(poll, name, everything.upto) is None
    for round_ in range(10):
        poll.publish("k0", f"value {round_}")
        update = dict(poll.take_updates())
        assert len(update) == len(names)
        upto = update[names[0]].upto
        assert all(each is update[names[0]] for each in update.values()), "made once, for all"
        assert values(update[names[0]]) == {"k0": f"value {round_}"}
        for name in names:
            assert not poll.held_by_all("k0")
            assert listen(poll, name, upto) is None
        assert poll.held_by_all("k0")
        for name in names:  # heartbeats
            assert listen(poll, name, upto) is None
    seconds = time.process_time() - began
    assert seconds < 5, f"some 160,000 calls took {seconds:.1f} s of the processor, not 0.3"
