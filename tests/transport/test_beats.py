"""Links for beats over real sockets: answered at once, and dialed anew where they are silent."""

import asyncio
import itertools
import secrets

import pytest

from greenroom.actors.transport import beats, other_hosts
from greenroom.actors.transport.addresses import drawn_address
from greenroom.actors.transport.cluster_key import KeyFiles, key_id, make_key
from greenroom.core.cluster.key_rotation import KeyIds
from tests.support.lone_loop import LoneLoop
from tests.transport.worlds import HERE, THERE, key_of


class Beating:
    """Beats from one process to another, ten times faster than hosts do."""

    EVERY_S = 0.02

    def __init__(self, world, one, target):
        self._world = world
        self.answers = []
        self._numbers = itertools.count(1)
        self.link = one.links.other_hosts.beat_link(
            getattr(target, "address", target), self.answers.append
        )
        self._beat()

    def _beat(self):
        self._timer = self._world.loop.call_later(self.EVERY_S, self._beat)
        self.link.send(next(self._numbers).to_bytes(beats.SIZE, "big"))

    def until_answered(self, times=3):
        wanted = len(self.answers) + times
        self._world.until(lambda: len(self.answers) >= wanted, "it is answered")

    def close(self):
        self._timer.cancel()
        self.link.close()


@pytest.fixture
def beat(world):
    beating = []

    def begin(one, target):
        beating.append(Beating(world, one, target))
        return beating[-1]

    yield begin
    for each in beating:
        each.close()


def test_every_process_answers_beats_with_themselves(hosts, beat):
    _, one, there, other = hosts
    for target in (there, other):
        beating = beat(one, target)
        beating.until_answered()
        numbers = [int.from_bytes(answer, "big") for answer in beating.answers]
        assert numbers == sorted(set(numbers))
    assert there.inbox == other.inbox == []


def test_a_process_may_answer_in_its_own_way_or_not_at_all(world, hosts, beat):
    _, one, _, other = hosts
    other.links.other_hosts.answer_beat = lambda beat: beat[::-1]
    beating = beat(one, other)
    beating.until_answered()
    assert beating.answers[0][0] != 0 == beating.answers[0][-1]
    other.links.other_hosts.answer_beat = lambda _: b""
    world.run_for(0.1)
    before = len(beating.answers)
    world.run_for(0.2)
    assert len(beating.answers) == before


def test_there_is_no_link_for_beats_within_a_host_or_without_a_way(world, hosts):
    here, one, _, _ = hosts
    assert one.links.other_hosts.beat_link(here.address, print) is None
    assert world.process().links.other_hosts is None


def test_large_messages_do_not_delay_beats(world, hosts, beat):
    _, one, _, other = hosts
    beating = beat(one, other)
    beating.until_answered()
    body = secrets.token_bytes(1024) * 40 * 1024
    one.send(other, body)
    before = len(beating.answers)
    world.until(lambda: one.done)
    assert len(beating.answers) > before
    assert other.bodies == [body]


def test_a_silent_link_is_dialed_anew_and_one_connection_is_left(world, hosts, beat, monkeypatch):
    monkeypatch.setattr(beats, "REDIAL_S", 0.1)
    _, one, there, other = hosts
    quiet = len(one.links.descriptors())
    beating = beat(one, other)
    beating.until_answered()
    other.links.other_hosts.answer_beat = lambda _: b""
    world.until(lambda: len(one.links.descriptors()) > quiet + 2, "it dials again and again")
    other.links.other_hosts.answer_beat = lambda beat: beat
    beating.until_answered()
    world.until(lambda: len(one.links.descriptors()) == quiet + 1, "the others are closed")
    world.until(lambda: not len(there.strangers))


def test_a_host_that_takes_long_to_connect_with_is_not_dialed_more_and_more_often():
    loop, dialing, counts = LoneLoop().asyncio, set(), []

    async def dial():
        task = asyncio.current_task()
        dialing.add(task)
        counts.append(len(dialing))
        try:
            await asyncio.sleep(4.0)
        finally:
            dialing.remove(task)
        raise OSError("too late")

    async def main():
        link = beats.BeatLink(loop, dial, print)
        for _ in range(100):
            link.send(b"b" * beats.SIZE)
            await asyncio.sleep(0.1)
        assert max(counts) == beats.MOST_DIALED
        assert len(counts) >= 3 * beats.MOST_DIALED - 1, "it goes on"
        link.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(main())


def test_beats_to_a_process_that_is_gone_are_tried_at_a_slow_pace(world, hosts, beat, port):
    _, one, _, _ = hosts
    for target in (drawn_address(THERE, port), drawn_address("127.0.0.99", port)):
        quiet = len(one.links.descriptors())
        beating = beat(one, target)
        world.run_for(0.3)
        assert not beating.answers
        assert len(one.links.descriptors()) <= quiet + 1


def test_whoever_lacks_the_cluster_file_is_not_answered(world, hosts, beat, port):
    _, stranger = world.host("127.0.0.4", port, cluster=1)
    beating = beat(stranger, hosts[3])
    world.run_for(0.3)
    assert not beating.answers


def test_a_link_goes_on_over_a_new_cluster_file(world, port, beat, monkeypatch):
    monkeypatch.setattr(other_hosts, "KEY_CHECK_S", 0.05)
    monkeypatch.setattr(beats, "REDIAL_S", 0.1)
    new = make_key()
    old_id, new_id = key_id(key_of(0)), key_id(new)
    both = [KeyFiles(world.key_file()) for _ in range(2)]
    _, one = world.host(HERE, port, keys=both[0])
    _, other = world.host(THERE, port, keys=both[1])
    beating = beat(one, other)
    for wanted in (KeyIds(old_id, next=new_id), KeyIds(new_id, last=old_id), KeyIds(new_id)):
        for keys in both:
            keys.hold(wanted, [new])
        world.run_for(0.2)
        beating.until_answered()


def test_a_link_that_is_closed_leaves_nothing(world, hosts, beat):
    _, one, _, other = hosts
    quiet = [len(each.links.descriptors()) for each in (one, other)]
    for wait_s in (0.0, 0.002, 0.2):
        beating = beat(one, other)
        world.run_for(wait_s)
        beating.close()
        world.until(lambda: [len(each.links.descriptors()) for each in (one, other)] == quiet)
