"""The front's processes: starting, draining, dying, and coming back."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest


def test_the_processes_carry_titles(start_front):
    front = start_front()
    (worker,) = front.workers()
    assert psutil.Process(front.process.pid).cmdline()[0] == "understudy: http master"
    assert psutil.Process(worker).cmdline()[0] == "understudy: http worker"


def test_an_idle_front_stops_within_a_second_and_leaves_no_worker(start_front):
    front = start_front()
    workers = front.workers()
    assert front.stop() < 1.0
    assert front.process.returncode == 0
    assert not any(map(psutil.pid_exists, workers))


def test_open_connections_without_a_request_do_not_hold_up_the_stop(start_front):
    front = start_front()
    used, unused = front.open(), front.connect()
    assert front.ask_on(used, "/echo").status == 200
    assert front.stop() < 1.5
    unused.close()
    used.close()


def test_a_request_in_flight_is_finished_and_health_is_503_meanwhile(start_front, until):
    front = start_front()
    answers = []
    slow = threading.Thread(target=lambda: answers.append(front.ask("/sleep/0.8")))
    slow.start()
    until("the query is asked", lambda: "/sleep/0.8" in front.ask("/seen").json["asked_paths"])
    front.signal(signal.SIGTERM)
    until("health is 503", lambda: front.ask("/-/healthz").status == 503, within_s=0.6)
    refused = front.ask("/echo")
    slow.join()
    front.process.wait(2)
    assert (refused.status, refused["retry-after"]) == (503, "1")
    assert answers[0].status == 200
    assert front.process.returncode == 0
    assert [entry["status"] for entry in front.log() if entry["path"] == "/sleep/0.8"] == [200]


def test_the_last_requests_before_the_stop_are_in_the_access_log(start_front):
    front = start_front()
    front.ask("/echo/last")
    front.stop()
    assert front.log()[-1]["path"] == "/echo/last"


def test_even_an_interrupt_flushes_the_access_log(start_front):
    front = start_front()
    front.ask("/echo/last")
    front.signal(signal.SIGINT)
    front.process.wait(5)
    assert front.log()[-1]["path"] == "/echo/last"


def test_a_killed_worker_is_replaced_within_a_second(start_front):
    front = start_front()
    (worker,) = front.workers()
    os.kill(worker, signal.SIGKILL)
    killed_at = time.monotonic()
    answer = front.ask("/echo")  # waits in the listening socket for the next worker
    assert time.monotonic() - killed_at < 1.0
    assert answer.json["pid"] != worker


def test_the_listening_socket_outlives_the_master(start_front, until):
    front = start_front()
    workers = front.workers()
    front.signal(signal.SIGKILL)
    front.process.wait()
    until("the workers have followed", lambda: not any(map(psutil.pid_exists, workers)))
    waiting = front.connect()  # the test still holds the socket
    waiting.close()


def test_connections_spread_over_the_workers(start_front, until):
    front = start_front(UNDERSTUDY_HTTP_WORKERS="2")
    seen = set()
    until("both workers serve", lambda: seen.add(front.ask("/").json["pid"]) or len(seen) == 2)
    connections = [front.open() for _ in range(40)]
    clients = [threading.Thread(target=connection.connect) for connection in connections]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    pids = [front.ask_on(connection, "/echo").json["pid"] for connection in connections]
    for connection in connections:
        connection.close()
    assert len(set(pids)) == 2
    assert max(pids.count(pid) for pid in set(pids)) <= 36


def test_without_a_socket_given_it_listens_where_the_settings_say(start_front):
    front = start_front(pass_socket=False)
    assert front.ask("/-/healthz").body == b"success"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("UNDERSTUDY_HTTP_FD", "999"), ("UNDERSTUDY_HTTP_FD", "x"), ("UNDERSTUDY_HTTP_PORT", "x")],
)
def test_a_bad_setting_is_one_line_naming_the_value_and_exit_code_2(tmp_path, variable, value):
    environ = {**os.environ, "UNDERSTUDY_STATE_DIR": str(tmp_path), variable: value}
    command = [sys.executable, "-m", "understudy.http_front.server"]
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert repr(value) in ended.stderr
