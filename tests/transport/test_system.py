"""Whole actor systems on our base: what Thespian promises, and the repairs."""

import os
import signal
import socket
import time

import pytest
from thespian.actors import ActorExitRequest, NoCompatibleSystemForActor, PoisonMessage

from greenroom.actors.runtime.processes import child_pids
from tests.support.systems import alive, wait_until
from tests.support.timing import check_within
from tests.transport.workers import ASK_S, FailsOnce, Worker, WorksOnTheOther, admin_of, new_child
from tests.transport.worlds import open_files


def test_actors_answer_create_and_wake(system, worker):
    assert system.ask(worker, ("echo", 1), ASK_S) == (1,)
    child, pid = new_child(system, worker)
    assert system.ask(child, ("pid",), ASK_S) == pid
    assert system.ask(worker, ("wake", 0.01), ASK_S) == "woken"


def test_a_global_name_is_one_actor_and_is_given_anew_after_its_death(system):
    def named(timeout_s=ASK_S):
        return system.ask(system.createActor(Worker, globalName="one"), ("pid",), timeout_s)

    pid = named()
    assert named() == pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), 5, "the actor is dead")
    assert wait_until(lambda: named(1), 5, "another") != pid


def test_a_global_name_that_no_system_can_have_is_refused_every_time(system):
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(NoCompatibleSystemForActor):
            system.createActor(WorksOnTheOther, globalName="there")
    assert time.monotonic() - begun < 10, "each but the first hung for 50 seconds"


@pytest.mark.parametrize("number", [1, 5])
def test_each_child_that_is_killed_is_reported_once(system, worker, number):
    children = [new_child(system, worker) for _ in range(number)]
    for _, pid in children:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: system.ask(worker, ("exits",), ASK_S)[0] >= number, 5, "all are told")
    assert system.ask(worker, ("exits",), ASK_S) == (number, True)


def test_a_child_that_exits_is_reported_once(system, worker):
    child, pid = new_child(system, worker)
    system.tell(child, ActorExitRequest())
    wait_until(lambda: not alive(pid), 5, "the child is gone")
    wait_until(lambda: system.ask(worker, ("exits",), ASK_S)[0], 5, "its exit is told")
    assert system.ask(worker, ("echo", 1), ASK_S) == (1,)
    assert system.ask(worker, ("exits",), ASK_S) == (1, True)


def test_a_message_for_the_dead_becomes_a_dead_letter_at_once(system, worker):
    assert system.ask(worker, ("collect_dead",), ASK_S)
    lost = []

    def attempt():
        child, pid = new_child(system, worker)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), 5, "the child is dead")
        begun = time.monotonic()
        system.tell(worker, ("tell", child, ("echo", "lost")))
        lost.append(("echo", "lost"))
        wait_until(lambda: system.ask(worker, ("dead",), ASK_S) == (lost,), 5, "own_ack")
        return time.monotonic() - begun

    check_within(1, attempt)


def test_telling_waits_for_the_arrival_and_not_for_the_handler(system, worker):
    begun = time.monotonic()
    child, pid = new_child(system, worker)
    system.tell(child, ("sleep", 30))
    assert time.monotonic() - begun < 5
    os.kill(pid, signal.SIGKILL)
    assert system.ask(worker, ("echo", 1), ASK_S) == (1,)


def test_a_handler_that_raised_is_run_again_and_then_its_message_is_poison(system):
    actor = system.createActor(FailsOnce)
    assert system.ask(actor, "fail once", ASK_S) == "run 2"
    answer = system.ask(actor, "fail always", ASK_S)
    assert isinstance(answer, PoisonMessage)
    assert answer.poisonMessage == "fail always"
    assert system.ask(actor, "runs", ASK_S) == 4


def test_the_admin_logs_what_an_actor_forwards(start, tmp_path):
    path = tmp_path / "log"
    file = {"class": "logging.FileHandler", "filename": str(path)}
    log_defs = {"version": 1, "handlers": {"file": file}, "root": {"handlers": ["file"]}}
    system = start(log_defs=log_defs)
    system.tell(system.createActor(Worker), ("warn", "of an actor"))
    wait_until(lambda: "of an actor" in path.read_text(), 5, "it is in the file")


def test_after_the_admins_death_its_address_is_free_at_once(system, worker, start):
    admin = admin_of(system, worker)
    actor = system.ask(worker, ("pid",), ASK_S)
    os.kill(admin, signal.SIGKILL)
    begun = time.monotonic()
    another = start(system.port)
    assert time.monotonic() - begun < 10, "it does not wait for the kernel to forget the old one"
    assert another.ask(another.createActor(Worker), ("echo", 1), ASK_S) == (1,)
    assert system.ask(worker, ("echo", 1), ASK_S) == (1,), "actors live on"
    os.kill(actor, signal.SIGKILL)


def test_actors_do_not_keep_what_their_starter_had_open(start):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        read_fd, write_fd = os.pipe()
        system = start()
        worker = system.createActor(Worker)
        assert system.ask(worker, ("echo", 1), ASK_S)
        name = os.readlink(f"/proc/self/fd/{listener.fileno()}")
    admin = admin_of(system, worker)
    pids = [admin, *child_pids(admin)]
    assert len(pids) == 2, "the worker"
    wait_until(lambda: not any(name in open_files(pid) for pid in pids), 5, "they let go of it")
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


def test_shutdown_ends_every_process(start):
    system = start()
    worker = system.createActor(Worker)
    pids = [system.ask(worker, ("pid",), ASK_S), new_child(system, worker)[1]]
    pids.append(admin_of(system, worker))
    pids += list(child_pids(pids[-1]))
    system.shutdown()
    wait_until(lambda: not any(map(alive, pids)), 5, "all processes have ended")
