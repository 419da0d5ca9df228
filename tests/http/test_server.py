"""The front's processes: starting, draining, dying, and coming back."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.client import HTTPException

import psutil
import pytest

from greenroom.actors.runtime.draining import record_drain_s
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import InvalidRequestError
from greenroom.http_front.server import inherited_fd
from greenroom.http_front.worker import FRESH_S
from tests.support.asking import connect
from tests.support.programs import python

DEADLINE_S = 30.0
AT_ONCE_S = 5.0  # a fraction of a second on an idle machine; every time limit here is longer
COUNT_FAULTS = """
from resource import RUSAGE_SELF, getrusage
from greenroom.actors.runtime.actor import keep_freed_memory

keep_freed_memory()
bytearray(10_000_000)
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(10):
    bytearray(10_000_000)
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_front_ends_at_once_with_its_last_requests_logged_and_leaves_no_worker(
    start_front, number
):
    front = start_front()
    workers = front.workers()
    titles = [psutil.Process(pid).cmdline()[0] for pid in (front.process.pid, *workers)]
    assert titles == ["greenroom: http master", "greenroom: http worker"]
    used, unused = connect(front.url), front.connect()
    used.request("GET", "/echo/last")
    assert used.getresponse().status == 200
    signalled_at = time.monotonic()
    front.signal(number)
    front.process.wait(DEADLINE_S)
    assert time.monotonic() - signalled_at < AT_ONCE_S
    assert front.process.returncode == 0
    assert not any(map(psutil.pid_exists, workers))
    assert front.log()[-1]["path"] == "/echo/last"
    unused.close()
    used.close()


def test_a_request_in_flight_is_finished_and_health_is_503_meanwhile(start_front, until, tmp_path):
    front = start_front()
    answers = []
    gate = tmp_path / "gate"
    slow = threading.Thread(target=lambda: answers.append(front.ask(f"/gate{gate}")))
    slow.start()
    until("the query is asked", lambda: f"/gate{gate}" in front.ask("/seen").json["asked_paths"])
    front.signal(signal.SIGTERM)
    until("health is 503", lambda: front.ask("/-/healthz").status == 503)
    refused = front.ask("/echo")
    gate.touch()
    slow.join()
    front.process.wait(DEADLINE_S)
    assert (refused.status, refused["retry-after"]) == (503, "1")
    assert answers[0].status == 200
    assert front.process.returncode == 0
    assert [entry["status"] for entry in front.log() if entry["path"] == f"/gate{gate}"] == [200]


def test_a_stop_resets_no_connection_that_is_in_use(start_front, until):
    front = start_front()
    ends, counts = [], Counter()

    def post_on(number):
        connection, sent_at = connect(front.url), time.monotonic()
        while True:
            before, sent_at = sent_at, time.monotonic()
            begun = b""
            try:
                connection.request("POST", "/echo", b"once")
                begun = connection.sock.recv(1, socket.MSG_PEEK)
                answer = connection.getresponse()
                answer.read()
            except (OSError, HTTPException) as error:
                idle_s = time.monotonic() - before  # at most: the answer came after its request
                if begun or not isinstance(error, ConnectionError) or idle_s < FRESH_S:
                    ends.append(error)  # else it was closed before the request came
                return
            counts[number] += 1
            if answer.getheader("connection") == "close":
                ends.append(answer.status)
                return

    clients = [threading.Thread(target=post_on, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    until("all post", lambda: len(counts) == 8 and min(counts.values()) > 10)
    front.signal(signal.SIGTERM)
    for client in clients:
        client.join()
    front.process.wait(DEADLINE_S)
    assert set(ends) <= {200, 503}


def test_a_killed_worker_is_replaced_at_once(start_front):
    front = start_front()
    (worker,) = front.workers()
    os.kill(worker, signal.SIGKILL)
    killed_at = time.monotonic()
    answer = front.ask("/echo")  # waits in the listening socket for the next worker
    assert time.monotonic() - killed_at < AT_ONCE_S
    assert answer.json["pid"] != worker


def test_the_workers_of_a_dead_master_serve_on_until_they_are_asked_to_end(start_front, until):
    front = start_front()
    workers = front.workers()
    front.signal(signal.SIGKILL)
    front.process.wait()
    assert front.ask("/echo").json["pid"] in workers
    for worker in workers:  # as the host process does, once those of the next master are ready
        os.kill(worker, signal.SIGTERM)
    until("the workers have ended", lambda: not any(map(psutil.pid_exists, workers)))
    waiting = front.connect()  # the test still holds the socket
    waiting.close()


def test_all_workers_serve(start_front, until):
    front = start_front(GREENROOM_HTTP_WORKERS="2")
    seen = set()
    until("both workers serve", lambda: seen.add(front.ask("/").json["pid"]) or len(seen) == 2)


@pytest.mark.parametrize("step", ["init_process", "load_wsgi"])
def test_a_worker_that_is_told_to_end_while_it_begins_ends(start_front, until, tmp_path, step):
    settings = read_settings({}, state_dir=tmp_path)
    settings.drain_file.parent.mkdir(exist_ok=True)
    record_drain_s(settings, 1000)
    others_begin = tmp_path / "others begin"
    late = {"LATE_STEP": step, "OTHERS_BEGIN": str(others_begin)}
    front = start_front(GREENROOM_HTTP_WORKERS="2", **late)
    until("two workers are there", lambda: len(front.workers()) == 2)
    front.signal(signal.SIGTERM)
    until("the first one has ended", lambda: len(front.workers()) == 1)
    others_begin.touch()
    front.process.wait(DEADLINE_S)
    assert front.process.returncode == 0


def test_without_a_socket_given_it_listens_where_the_settings_say(start_front):
    front = start_front(pass_socket=False)
    assert front.ask("/-/healthz").body == b"success"


def test_a_bad_setting_is_one_line_naming_the_value_and_exit_code_2(tmp_path):
    environ = {**os.environ, "GREENROOM_STATE_DIR": str(tmp_path), "GREENROOM_FRONT_FD": "999"}
    command = [sys.executable, "-m", "greenroom.http_front.server"]
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "GREENROOM_FRONT_FD='999'" in ended.stderr
    with pytest.raises(InvalidRequestError, match="GREENROOM_FRONT_FD='x'"):
        inherited_fd({"GREENROOM_FRONT_FD": "x"})


@pytest.mark.parametrize("is_users", [False, True])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(is_users):
    given = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    faults = int(python("-c", COUNT_FAULTS, **(given if is_users else {})))
    pages = 10_000_000 // resource.getpagesize()
    assert faults > 5 * pages if is_users else faults < pages
