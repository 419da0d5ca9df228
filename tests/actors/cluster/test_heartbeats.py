"""Beats over real sockets: only who holds the key, is known and hears the answers counts."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from greenroom.actors.cluster.heartbeats import SIZE, Beater, BeatListener, Sealed
from greenroom.core.cluster.hosts import BEAT_S, LOST_AFTER_S
from tests.support.another_user import NOBODY, another_user, tried_by_another_user

HERE, THERE = "127.0.0.2", "127.0.0.3"
KEY = bytes(range(32))


class Link:
    """The controller's end and one host's, on one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.controller, self.host = secrets.token_hex(8), secrets.token_hex(8)
        self.beats: list[str] = []
        self.clock_ahead_s = 0.0
        self.at = (HERE, _free_udp_port())
        clock = lambda: time.monotonic() + self.clock_ahead_s  # noqa: E731
        self.listener = BeatListener(
            self.loop, self.at, lambda: [KEY], self.controller, clock, self.beats.append
        )
        self.beater: Beater | None = None

    def beat(self, key: bytes = KEY, controller: str = "") -> None:
        self.beater = Beater(
            self.loop, THERE, lambda: [key], self.host, self.at, controller or self.controller
        )

    def until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            deadline = time.monotonic() + 10
            while not condition():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

        self.loop.run_until_complete(wait())

    def some_beats(self) -> None:
        """Let the time of some beats pass; what must not happen has had its chance."""
        self.loop.run_until_complete(asyncio.sleep(4 * BEAT_S))

    def close(self) -> None:
        if self.beater is not None:
            self.beater.close()
        self.listener.close()
        self.loop.close()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def _free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def test_a_host_that_hears_the_answers_is_heard_again_and_again(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat()
    link.until(lambda: len(link.beats) >= 3)
    assert set(link.beats) == {link.host}


def test_a_later_beater_of_the_same_process_is_heard_too(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat()
    link.until(lambda: len(link.beats) >= 3)
    assert link.beater is not None
    link.beater.close()
    heard = len(link.beats)
    link.beat()
    link.until(lambda: len(link.beats) > heard)


@pytest.mark.parametrize("wrong", ["key", "stranger", "forgotten"])
def test_who_is_not_known_or_has_another_key_is_not_heard(link: Link, wrong: str) -> None:
    if wrong != "stranger":
        link.listener.expect(link.host)
    if wrong == "forgotten":
        link.listener.forget(link.host)
    link.beat(key=bytes(32) if wrong == "key" else KEY)
    link.some_beats()
    assert link.beats == []


def test_a_host_that_does_not_hear_the_answers_is_not_heard(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat(controller=secrets.token_hex(8))  # the answers of this one count for nothing
    link.some_beats()
    assert link.beats == []


def test_a_beat_that_names_an_old_answer_is_not_heard(link: Link) -> None:
    link.listener.expect(link.host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as host:
        host.bind((THERE, 0))
        host.settimeout(5)
        sealed, answers = Sealed(lambda: [KEY], b"hosts"), Sealed(lambda: [KEY], b"the controller")

        def beat(number: int, heard: int) -> int:
            host.sendto(sealed.write(link.host, number, heard), link.at)
            answered: list[int] = []

            def read() -> bool:
                host.setblocking(False)
                try:
                    answer = answers.read(host.recv(SIZE))
                except BlockingIOError:
                    return False
                assert answer is not None
                answered.append(answer[1])
                return True

            link.until(read)
            return answered[0]

        first = beat(1, 0)
        beat(2, first)
        assert len(link.beats) == 1
        link.clock_ahead_s = LOST_AFTER_S
        beat(3, first)
        assert len(link.beats) == 1


def test_a_recorded_beat_and_what_is_no_beat_count_for_nothing(link: Link) -> None:
    link.listener.expect(link.host)
    sealed = Sealed(lambda: [KEY], b"hosts")
    beats = [sealed.write(link.host, 5, 1), sealed.write(link.host, 6, 1)]
    wrong = [b"", bytes(SIZE), beats[0][:-1], beats[0] + b"x", b"x" * 2000]
    wrong.append(Sealed(lambda: [KEY], b"the controller").write(link.host, 7, 1))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
        anybody.bind((THERE, 0))
        for datagram in (*beats, beats[0], beats[1], beats[1], *wrong):
            anybody.sendto(datagram, link.at)
        link.until(lambda: link.beats)
        link.some_beats()
    assert link.beats == [link.host]  # the second, which names the answer to the first


TAKE = """
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    sock.bind((sys.argv[1], int(sys.argv[2])))
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
else:
    print("ready", flush=True)
    time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("address", [HERE, "0.0.0.0"])
def test_another_user_cannot_take_the_address_that_beats_arrive_at(
    link: Link, address: str
) -> None:
    assert tried_by_another_user(TAKE, address, link.at[1], 0) == "EADDRINUSE"


def test_a_controller_that_is_started_again_at_once_hears_beats(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat()
    for _ in range(3):
        link.until(lambda: link.beats)
        link.listener.close()
        link.listener = BeatListener(
            link.loop, link.at, lambda: [KEY], link.controller, time.monotonic, link.beats.append
        )
        link.listener.expect(link.host)
        link.beats.clear()
    link.until(lambda: link.beats)


def test_who_has_the_address_is_named_and_beats_are_heard_when_it_is_free(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    link.listener.close()
    with another_user(TAKE, *link.at, 60):
        link.listener = BeatListener(
            link.loop, link.at, lambda: [KEY], link.controller, time.monotonic, link.beats.append
        )
        assert f"by user {NOBODY};" in caplog.text
    link.listener.expect(link.host)
    link.beat()
    link.until(lambda: link.beats)
    assert len(caplog.records) == 1
