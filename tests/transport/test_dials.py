"""Many connections that are dialed at once at one gate, as after a cut, all get through."""

import asyncio
import time
from contextvars import ContextVar

import pytest

from greenroom.actors.transport.other_hosts import (
    DIAL_TIMEOUT_S,
    DIALS_AT_ONCE,
    MESSAGES,
    Dials,
    UnreachableError,
)
from greenroom.actors.transport.tls import TlsStream
from tests.support.lone_loop import LoneLoop

MANY = 5 * DIALS_AT_ONCE


def test_a_gate_that_is_slow_is_reached_by_all_and_shakes_hands_once_with_each(
    world, hosts, monkeypatch
):
    here, _, there, _ = hosts
    others, shaken = here.links.other_hosts, []
    there.strangers.patience_s = 60.0  # which is for strangers, and of both handshakes
    handshake = TlsStream._handshake

    def slowly(stream):
        time.sleep(0.003)  # of a processor that others have most of
        is_over = handshake(stream)
        shaken.extend([stream] * is_over)
        return is_over

    monkeypatch.setattr(TlsStream, "_handshake", slowly)

    async def dial():
        dialing = (others.reach(others.new_socket(), there.address, MESSAGES) for _ in range(MANY))
        begun_at = time.monotonic()
        streams = await asyncio.gather(*dialing)
        assert time.monotonic() - begun_at > DIAL_TIMEOUT_S, "it was not slow"
        for stream in streams:
            stream.close()

    world.loop.run_until_complete(dial())
    assert len(set(shaken)) == 4 * MANY  # with the gate and with the process, at both ends


def test_one_whose_packets_are_lost_does_not_count_its_host_as_gone_if_others_get_there(
    world, hosts, monkeypatch
):
    here, _, there, _ = hosts
    others, loop = here.links.other_hosts, world.loop
    is_lost, connect = ContextVar("is_lost", default=False), loop.sock_connect

    def dial():
        return others.reach(others.new_socket(), there.address, MESSAGES)

    async def lose():
        is_lost.set(True)
        await dial()

    async def connect_unless_lost(sock, address):
        if is_lost.get():
            await loop.create_future()
        await connect(sock, address)

    async def main():
        lost = asyncio.ensure_future(lose())
        await asyncio.sleep(0)
        (await dial()).close()
        with pytest.raises(TimeoutError):
            await lost

    monkeypatch.setattr(loop, "sock_connect", connect_unless_lost)
    loop.run_until_complete(main())


@pytest.fixture
def lone():
    return LoneLoop().asyncio


async def _dial(dials, after_s, *, is_urgent=False, error=None, connects=True):
    async with dials.turn(is_urgent=is_urgent):
        if connects:
            dials.connected()
        await asyncio.sleep(after_s)
        if error is not None:
            raise error
        dials.answered()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("connects", "kind"), [(True, TimeoutError), (False, UnreachableError)])
def test_where_a_gate_answers_nobody_those_that_wait_fail_with_those_that_dial(
    lone, connects, kind
):
    async def main():
        dials, begun_at = Dials(lone), lone.time()
        dialing = [_dial(dials, 1000.0, connects=connects) for _ in range(MANY)]
        found = await asyncio.gather(*dialing, return_exceptions=True)
        assert dials.is_idle
        return found, lone.time() - begun_at

    found, took_s = lone.run_until_complete(main())
    assert {type(each) for each in found} == {kind}
    assert took_s == pytest.approx(DIAL_TIMEOUT_S)


def test_one_that_begins_to_wait_just_before_others_fail_has_its_own_time(lone):
    async def main():
        dials, begun_at = Dials(lone), lone.time()
        first = [asyncio.ensure_future(_dial(dials, 1000.0)) for _ in range(DIALS_AT_ONCE)]
        await asyncio.sleep(DIAL_TIMEOUT_S - 0.1)
        last = asyncio.ensure_future(_dial(dials, 1.0))
        await asyncio.gather(*first, return_exceptions=True)
        assert await last == pytest.approx(begun_at + DIAL_TIMEOUT_S + 1.0)

    lone.run_until_complete(main())


def test_one_of_many_that_fails_ends_none_that_waits_while_others_are_answered(lone):
    async def main():
        dials = Dials(lone)
        first = asyncio.ensure_future(_dial(dials, 1.0, error=TimeoutError()))
        others = [asyncio.ensure_future(_dial(dials, 0.5)) for _ in range(MANY)]
        await asyncio.gather(*others)
        with pytest.raises(TimeoutError):
            await first

    lone.run_until_complete(main())


def test_a_newcomer_waits_behind_those_that_wait(lone):
    async def main():
        dials, begun = Dials(lone), []

        async def dial(name):
            async with dials.turn(is_urgent=False):
                begun.append(name)
                await asyncio.sleep(1.0)
                dials.answered()

        dialing = [asyncio.ensure_future(dial(n)) for n in range(DIALS_AT_ONCE + 1)]
        dialing[0].add_done_callback(lambda _: dialing.append(asyncio.ensure_future(dial("new"))))
        await asyncio.sleep(1.5)
        await asyncio.gather(*dialing)
        assert begun == [*range(DIALS_AT_ONCE + 1), "new"]

    lone.run_until_complete(main())


def test_beats_wait_for_no_turn_and_a_turn_that_is_not_taken_is_passed_on(lone):
    async def main():
        dials, begun_at = Dials(lone), lone.time()
        dialing = [asyncio.ensure_future(_dial(dials, 1.0)) for _ in range(2 * DIALS_AT_ONCE)]
        await asyncio.sleep(0)
        assert await _dial(dials, 0.1, is_urgent=True) == pytest.approx(begun_at + 0.1)
        last = asyncio.ensure_future(_dial(dials, 1.0))
        await asyncio.sleep(0)
        dialing[0].add_done_callback(lambda _: dialing[DIALS_AT_ONCE].cancel())
        await asyncio.gather(*dialing, return_exceptions=True)
        assert dialing[DIALS_AT_ONCE].cancelled()
        assert await last == pytest.approx(begun_at + 2.0)

    lone.run_until_complete(main())
