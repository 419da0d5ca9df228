"""The API that Thespian calls, between two transports of one process."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import pickle
import re
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import thespian
from thespian.actors import ActorAddress, ActorExitRequest, WakeupMessage, WatchMessage
from thespian.system.messages.multiproc import ChildMayHaveDied
from thespian.system.transport import (
    ExternalInterfaceTransportInit,
    SendStatus,
    Thespian__Run_HandlerResult,
    Thespian__Run_Terminated,
    Thespian__UpdateWork,
    TransmitIntent,
    TransmitOnly,
)

from greenroom.actors.transport import session, thespian_base
from greenroom.actors.transport.addresses import drawn_address
from greenroom.actors.transport.mailbox import attach
from greenroom.actors.transport.thespian_base import Transport
from tests.support.systems import wait_until
from tests.support.timing import check_within
from tests.transport.worlds import open_files

DEADLINE = timedelta(seconds=30)
PORT = 1
CAPABILITIES = {"Admin Port": PORT}


def new_transport() -> Transport:
    return Transport(ExternalInterfaceTransportInit(), CAPABILITIES, None, None)


@pytest.fixture
def transports():
    made = [new_transport(), new_transport()]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def transport(transports):
    return transports[0]


@pytest.fixture
def echo():
    """Return the address of a transport on a thread that sends everything back."""
    loop = asyncio.new_event_loop()
    echoing = attach(
        PORT,
        loop,
        lambda message, sender: echoing.send(sender, message, None, None),
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield echoing.address
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    echoing.close()
    loop.close()


class Sent:
    """An intent, and how it ended."""

    def __init__(self, transport, target, message="hello", **options):
        self.results = []
        note = lambda result, _: self.results.append(result)  # noqa: E731
        self.intent = TransmitIntent(target, message, onSuccess=note, onError=note, **options)
        transport.scheduleTransmit(None, self.intent)


def test_without_a_handler_the_first_envelope_is_returned(transport, echo):
    Sent(transport, echo, "one")
    Sent(transport, echo, "two")
    first, second = transport.run(None, DEADLINE), transport.run(None, DEADLINE)
    assert (first.message, second.message) == ("one", "two")
    assert first.sender == echo
    assert not first


def test_a_handler_is_called_until_it_returns_something_false(transport, echo):
    seen = []

    def handle(envelope):
        seen.append(envelope.message)
        return 0 if len(seen) == 3 else True

    for number in range(5):
        Sent(transport, echo, number)
    result = transport.run(handle, DEADLINE)
    assert isinstance(result, Thespian__Run_HandlerResult)
    assert result.return_value == 0
    assert seen == [0, 1, 2]
    assert transport.run(None, DEADLINE).message == 3


def test_a_run_ends_with_none_when_its_time_is_over(transport):
    begun = time.monotonic()
    assert transport.run(None, timedelta(milliseconds=30)) is None
    assert time.monotonic() - begun >= 0.03
    assert transport.run(None, 0) is None


class Counting:
    """Notes that it was printed."""

    printed: ClassVar[list[bool]] = []

    def __str__(self):
        self.printed.append(True)
        return "counting"


def test_a_message_is_printed_only_when_its_description_is(transport):
    Sent(transport, transport.myAddress, Counting())
    description = transport.run(None, DEADLINE).identify()
    assert not Counting.printed
    assert str(description)
    assert Counting.printed


def test_sending_only_handles_nothing_and_counts_what_is_left(transport, echo):
    sent = [Sent(transport, echo, number) for number in range(3)]
    left = [transport.run(TransmitOnly, DEADLINE)]
    while left[-1]:
        left.append(transport.run(TransmitOnly, DEADLINE))
    assert left[-1] == 0
    assert [each.results for each in sent] == [[SendStatus.Sent]] * 3
    assert transport.run(TransmitOnly, DEADLINE) == 0
    assert transport.run(None, DEADLINE).message == 0


@pytest.mark.parametrize(
    "details", [drawn_address("127.0.0.1"), None], ids=["nobody", "no address"]
)
def test_a_dead_target_is_reported_to_the_intent(transport, details):
    sent = Sent(transport, ActorAddress(details))
    assert transport.run(TransmitOnly, DEADLINE) == 0
    assert sent.results == [SendStatus.DeadTarget]


def test_aborting_ends_the_run_as_terminated(transport):
    transport.loop.call_soon(transport.abort_run)
    assert isinstance(transport.run(None, DEADLINE), Thespian__Run_Terminated)
    assert transport.run(None, timedelta(milliseconds=1)) is None, "only the run under way"


def test_aborting_when_drained_waits_for_the_transmits(transport, echo):
    sent = Sent(transport, echo)
    transport.loop.call_soon(transport.abort_run, True)
    assert isinstance(transport.run(lambda _: True, DEADLINE), Thespian__Run_Terminated)
    assert sent.results == [SendStatus.Sent]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_what_a_handler_raises_comes_out_of_the_run(transport, error):
    Sent(transport, transport.myAddress, "first")
    Sent(transport, transport.myAddress, "second")

    def handle(_):
        raise error

    with pytest.raises(type(error)):
        transport.run(handle, DEADLINE)
    assert transport.run(None, DEADLINE).message == "second"


def test_a_run_within_a_run_is_refused(transport):
    Sent(transport, transport.myAddress)

    def handle(_):
        with pytest.raises(RuntimeError, match="is running already"):
            transport.run(None, 0)
        return False

    assert transport.run(handle, DEADLINE).return_value is False


def test_what_wakes_only_thespians_own_transports_counts_as_sent_and_goes_nowhere(transport, echo):
    sent = Sent(transport, echo, Thespian__UpdateWork())
    assert sent.results == [SendStatus.Sent]
    assert transport.run(None, timedelta(milliseconds=20)) is None


def test_a_message_to_oneself_is_the_object_itself(transport):
    message = ["mine"]
    Sent(transport, transport.myAddress, message)
    assert transport.run(None, DEADLINE).message is message


def test_sending_to_oneself_without_end_lets_others_in(transport, echo):
    Sent(transport, transport.myAddress, "again")
    Sent(transport, echo, "from outside")

    def handle(envelope):
        if envelope.message == "again":
            Sent(transport, transport.myAddress, "again")
            return True
        return False

    assert transport.run(handle, DEADLINE) is not None


def test_what_cannot_be_pickled_raises_and_leaves_nothing(transport, echo):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        Sent(transport, echo, lambda: None)
    assert transport.run(TransmitOnly, DEADLINE) == 0


def test_a_message_is_what_it_was_when_it_was_sent(transport, echo):
    body = bytearray(b"before" * 100_000)
    Sent(transport, echo, pickle.PickleBuffer(body))
    body[:6] = b"AFTER!"
    assert bytes(transport.run(None, DEADLINE).message[:6]) == b"before"


class Sour:
    """Cannot be unpickled."""

    def __reduce__(self):
        return taste, ()


def taste():
    raise ImportError("tastes sour here")


def test_what_the_receiver_cannot_unpickle_is_dropped_and_the_others_keep_their_order(
    transport, echo, caplog
):
    for number in range(6):
        Sent(transport, echo, number if number % 3 else Sour())
    assert [transport.run(None, DEADLINE).message for _ in range(4)] == [1, 2, 4, 5]
    assert "tastes sour here" in caplog.text


def test_an_intent_whose_time_is_over_fails(transports):
    transport, silent = transports
    sent = Sent(transport, silent.myAddress, maxPeriod=timedelta(milliseconds=10))
    assert transport.run(TransmitOnly, DEADLINE) == 0
    assert sent.results == [SendStatus.Failed]


def test_a_logger_that_does_not_read_does_not_bring_down_who_logs(transports, monkeypatch):
    transport, stuck = transports
    monkeypatch.setattr(session, "MAX_KEPT", 50_000)

    class Forward(logging.Handler):
        def emit(self, record):
            Sent(transport, stuck.myAddress, logging.makeLogRecord(vars(record)))

    package = logging.getLogger("greenroom.actors.transport")
    package.addHandler(forward := Forward())
    try:
        sent = [Sent(transport, stuck.myAddress, bytes(1000)) for _ in range(200)]

        def is_reported():
            transport.run(None, timedelta(milliseconds=10))
            return SendStatus.Failed in [result for each in sent for result in each.results]

        wait_until(is_reported, 10, "what has no room has failed")
    finally:
        package.removeHandler(forward)


def test_wakeups_come_in_their_order_with_their_payload(transport):
    begun = time.monotonic()
    for delay_ms in (60, 20, 40):
        transport.addWakeup(timedelta(milliseconds=delay_ms), delay_ms)
    envelopes = [transport.run(None, DEADLINE) for _ in range(3)]
    assert time.monotonic() - begun >= 0.06
    assert [each.message.payload for each in envelopes] == [20, 40, 60]
    assert all(isinstance(each.message, WakeupMessage) for each in envelopes)
    assert envelopes[0].message.delayPeriod == timedelta(milliseconds=20)


def test_no_wakeup_is_lost_under_load(transport, echo):
    transport.addWakeup(timedelta(milliseconds=20), None)
    woken = []

    def handle(envelope):
        if isinstance(envelope.message, WakeupMessage):
            woken.append(True)
            return False
        Sent(transport, envelope.sender, envelope.message)
        return True

    for number in range(200):
        Sent(transport, echo, number)
    transport.run(handle, DEADLINE)
    assert woken


def test_a_watched_descriptor_is_reported_until_it_is_no_longer_watched(transport):
    read_fd, write_fd = os.pipe()
    transport.set_watch([read_fd])
    os.write(write_fd, b"x")
    message = transport.run(None, DEADLINE).message
    assert isinstance(message, WatchMessage)
    assert message.ready == [read_fd]
    transport.set_watch([read_fd])
    assert transport.run(None, DEADLINE).message.ready == [read_fd]
    transport.set_watch([])
    assert transport.run(None, timedelta(milliseconds=5)) is None
    os.close(read_fd)
    os.close(write_fd)


def test_a_number_that_is_another_file_by_now_is_watched_anew(transport):
    read_fd, write_fd = os.pipe()
    transport.set_watch([read_fd])
    other_read, other_write = os.pipe()
    os.dup2(other_read, read_fd)
    transport.set_watch([read_fd])
    os.write(other_write, b"x")
    assert transport.run(None, DEADLINE).message.ready == [read_fd]
    transport.set_watch([])
    for fd in (read_fd, write_fd, other_read, other_write):
        os.close(fd)


def test_a_number_that_was_reported_may_be_watched_by_others_from_then_on(transport):
    read_fd, write_fd = os.pipe()
    transport.set_watch([read_fd])
    os.write(write_fd, b"x")
    assert transport.run(None, DEADLINE).message.ready == [read_fd]
    seen = []
    transport.loop.add_reader(read_fd, lambda: seen.append(os.read(read_fd, 1)))
    transport.set_watch([])
    assert transport.run(None, timedelta(milliseconds=5)) is None
    assert seen == [b"x"]
    transport.loop.remove_reader(read_fd)
    os.close(read_fd)
    os.close(write_fd)


def test_a_closed_descriptor_is_not_watched_and_no_trouble(transport):
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    os.close(write_fd)
    transport.set_watch([read_fd])
    assert transport.run(None, timedelta(milliseconds=5)) is None


def test_signals_interrupt_a_waiting_loop(transport):
    before = signal.signal(signal.SIGUSR1, lambda *_: transport.interrupt_wait(check_children=True))
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        assert isinstance(transport.run(None, DEADLINE).message, ChildMayHaveDied)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert transport.run(None, timedelta(milliseconds=5)) is None
    transport.interrupt_wait(signal_shutdown=True)
    assert isinstance(transport.run(None, DEADLINE).message, ActorExitRequest)
    transport.interrupt_wait()
    assert transport.run(None, timedelta(milliseconds=5)) is None, "once"


def test_other_threads_may_send_while_the_loop_runs(transport, echo):
    threads, each = 8, 250

    def send(thread):
        for number in range(each):
            Sent(transport, echo, (thread, number))

    sending = [threading.Thread(target=send, args=(n,)) for n in range(threads)]
    for thread in sending:
        thread.start()
    arrived = [transport.run(None, DEADLINE).message for _ in range(threads * each)]
    for thread in sending:
        thread.join()
    assert sorted(arrived) == [(t, n) for t in range(threads) for n in range(each)]
    for thread in range(threads):
        assert [n for t, n in arrived if t == thread] == list(range(each))


def test_an_actor_may_start_tasks_on_the_loop_of_its_messages(transport):
    Sent(transport, transport.myAddress, "go")
    done = []

    async def work():
        await asyncio.sleep(0.01)
        done.append(True)
        transport.abort_run()

    tasks = []

    def handle(_):
        tasks.append(asyncio.get_running_loop().create_task(work()))
        return True

    transport.run(handle, DEADLINE)
    assert done


@pytest.mark.anyio
async def test_a_coroutine_may_use_a_transport_that_blocks(transport, echo):
    Sent(transport, echo)
    assert transport.run(None, DEADLINE).message == "hello"


@pytest.mark.anyio
async def test_a_transport_attaches_to_a_loop_that_runs(echo):
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    attached = attach(PORT, loop, lambda message, _sender: answer.set_result(message))
    attached.send(echo, "hello", None, None)
    assert await asyncio.wait_for(answer, DEADLINE.total_seconds()) == "hello"
    attached.close()


def test_what_a_callback_raises_is_the_loops_and_the_next_message_is_handled():
    loop = asyncio.new_event_loop()
    errors, seen = [], []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def take(message, _sender):
        if message == "bad":
            raise ValueError("as told")
        seen.append(message)
        loop.stop()

    attached, sender = attach(PORT, loop, take), attach(PORT, loop, take)
    for message in ("bad", "good"):
        sender.send(attached.address, message, None, None)
    loop.call_later(DEADLINE.total_seconds(), loop.stop)
    loop.run_forever()
    assert seen == ["good"]
    assert [str(error) for error in errors] == ["as told"]
    for each in (attached, sender):
        each.close()
    loop.close()


def test_a_clone_has_messages_of_its_own(transport, echo):
    clone = transport.external_transport_clone()
    Sent(clone, echo, "for the clone")
    Sent(transport, echo, "for the original")
    assert clone.run(None, DEADLINE).message == "for the clone"
    assert transport.run(None, DEADLINE).message == "for the original"
    clone.close()


def test_closing_fails_what_is_unfinished(transports):
    transport, silent = transports
    sent = Sent(transport, silent.myAddress)
    transport.close()
    transport.close()
    assert sent.results == [SendStatus.Failed]


def test_closing_leaves_no_descriptor(echo):
    before = Counter(open_files())
    for _ in range(10):
        transport = new_transport()
        Sent(transport, echo)
        transport.run(None, DEADLINE)
        transport.close()
    deadline = time.monotonic() + 10
    while (left := Counter(open_files()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_a_forked_child_does_not_disturb_its_parents_transport(transport, echo):
    Sent(transport, echo)
    assert transport.run(None, DEADLINE).message == "hello"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            Sent(transport, echo, "from the child")
        except RuntimeError:
            own = new_transport()
            Sent(own, echo, "on its own")
            code = 0 if own.run(None, DEADLINE).message == "on its own" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    Sent(transport, echo, "after")
    assert transport.run(None, DEADLINE).message == "after"


def test_a_parents_death_is_noticed_although_its_child_lives(transport):
    """Its listening socket must not live on in the child."""
    check_within(0.1, lambda: time_of_noticing_a_parents_death(transport))


def time_of_noticing_a_parents_death(transport):
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        doomed = new_transport()
        os.write(write_fd, pickle.dumps(doomed.myAddress))
        grandchild = os.fork()
        if not grandchild:
            os.write(write_fd, b"")
            time.sleep(30)
            os._exit(0)
        os.write(write_fd, b"%08d" % grandchild)
        signal.pause()
    os.close(write_fd)
    data = b""
    while len(data) < 8 or not data[-8:].isdigit():
        data += os.read(read_fd, 4096)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    sent = Sent(transport, pickle.loads(data[:-8]))
    begun = time.monotonic()
    assert transport.run(TransmitOnly, DEADLINE) == 0
    took_s = time.monotonic() - begun
    assert sent.results == [SendStatus.DeadTarget]
    os.kill(int(data[-8:]), signal.SIGKILL)
    os.close(read_fd)
    return took_s


def test_every_private_name_of_thespians_is_in_the_list():
    folder = Path(thespian_base.__file__).parent
    used = set()
    for file in ("thespian_base.py", "../runtime/actor.py"):
        for part in ast.parse((folder / file).read_text(encoding="utf-8")).body:
            if getattr(part, "name", "") not in {"Interrupts", "Transport"}:  # ours altogether
                attributes = [each for each in ast.walk(part) if isinstance(each, ast.Attribute)]
                used |= {each.attr for each in attributes if re.match(r"_[a-zA-Z]", each.attr)}
    theirs = {
        name
        for file in Path(thespian.__file__).parent.glob("system/**/*.py")
        for name in re.findall(r"\b_[a-zA-Z]\w+", file.read_text(encoding="utf-8"))
    }
    listed = set(re.findall(r"\b_[a-zA-Z]\w+", thespian_base.__doc__))
    pythons = {"_exit", "_set_running_loop"}
    assert (used & theirs) - pythons - {"_loop"} <= listed
    assert listed <= theirs
