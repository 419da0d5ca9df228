"""Many connections that are dialed at once at one gate, as after a cut, all get through."""

import asyncio
import time

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


@pytest.fixture
def lone():
    return LoneLoop().asyncio


async def _dial(dials, after_s, *, is_urgent=False, error=None):
    async with dials.turn(is_urgent=is_urgent):
        if error is not None:
            await asyncio.sleep(after_s)
            raise error
        async with dials.in_time():
            await asyncio.sleep(after_s)
            dials.answered()
    return asyncio.get_running_loop().time()


def test_those_that_wait_for_a_turn_fail_with_the_first_that_gets_no_answer(lone):
    async def main(*errors):
        dials, begun_at = Dials(lone), lone.time()
        dialing = [_dial(dials, 1000.0, error=error) for error in errors]
        dialing += [_dial(dials, 1000.0) for _ in range(MANY)]
        found = await asyncio.gather(*dialing, return_exceptions=True)
        assert dials.is_idle
        return found, lone.time() - begun_at

    found, took_s = lone.run_until_complete(main())
    assert {type(each) for each in found} == {TimeoutError}
    assert took_s == pytest.approx(DIAL_TIMEOUT_S)


def test_a_host_that_is_unreachable_is_so_for_those_that_wait_too(lone):
    async def dial(dials):
        async with dials.turn(is_urgent=False):
            await asyncio.sleep(DIAL_TIMEOUT_S)
            raise UnreachableError("no answer", is_certain=False)

    async def main():
        dials = Dials(lone)
        dialing = (dial(dials) for _ in range(MANY))
        return await asyncio.gather(*dialing, return_exceptions=True)

    begun_at = lone.time()
    assert {type(each) for each in lone.run_until_complete(main())} == {UnreachableError}
    assert lone.time() - begun_at == pytest.approx(DIAL_TIMEOUT_S)


def test_one_of_many_that_fails_ends_none_that_waits_while_others_are_answered(lone):
    async def main():
        dials = Dials(lone)
        first = asyncio.ensure_future(_dial(dials, 1.0, error=TimeoutError()))
        others = [asyncio.ensure_future(_dial(dials, 0.5)) for _ in range(MANY)]
        await asyncio.gather(*others)
        with pytest.raises(TimeoutError):
            await first

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
