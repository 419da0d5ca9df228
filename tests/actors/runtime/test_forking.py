"""What is forked to save its imports has nothing else of who forked it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from greenroom.actors.runtime import forking
from greenroom.actors.runtime.records import MARK

# Its own main module has a name that the child's must not have.
FORKS = """
import logging, os, signal, socket, sys
from greenroom.actors.runtime import forking, logs
from greenroom.actors.runtime.settings import read_settings

def tell():
    import __main__
    sys.stdout.reconfigure(line_buffering=True)  # so that it stands before what stderr gets
    logging.getLogger("greenroom.x").warning("logged")
    print({0, 1, 2, kept} < (has := set(map(int, os.listdir("/proc/self/fd")))), len(has))
    print(os.read(0, 1), os.readlink("/proc/self/fd/0"))
    print({signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)})
    print(hasattr(__main__, "tell"), __main__.__name__, sys.argv, sys.path[0] == "")
    print(len(logs.OUR_LOGGER.handlers), os.getsid(0) == os.getpid(), os.getcwd())
    raise RuntimeError("told")

settings = read_settings({"GREENROOM_STATE_DIR": sys.argv[1]})
logs.configure_logging(settings, "parent")
signal.signal(signal.SIGTERM, lambda *_: None)
other, kept = socket.socket(), os.open(os.devnull, os.O_RDONLY)
print("said before")
os.environ["ADDED"] = "x"
output = os.open(sys.argv[1] + "/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
pid = forking.fork(tell, output, keep=[kept])
print("ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run_program(folder: Path, text: str) -> str:
    """Run a program as a script; return what it has printed."""
    script = folder / "forks.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_has_what_it_is_to_keep_and_nothing_else(tmp_path):
    assert run_program(tmp_path, FORKS) == "said before\nended with 1\n"
    found = (tmp_path / "output").read_text().splitlines()
    assert found[:7] == [
        "logged",
        "True 5",  # with the one that looks
        "b'' /dev/null",
        "{<Handlers.SIG_DFL: 0>}",
        "False __main__ ['-c'] True",
        f"0 False {Path.cwd()}",
        "Traceback (most recent call last):",
    ]
    assert found[-1] == "RuntimeError: told"
    assert not (tmp_path / "logs" / "parent.log").read_text()


def test_a_process_whose_logs_are_on_a_full_disk_forks(tmp_path):
    program = """
        import logging, os, sys
        from greenroom.actors.runtime import forking, logs

        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 2)
        sys.stderr = open(2, "w", closefd=False)  # buffered, whatever PYTHONUNBUFFERED says
        logs.OUR_LOGGER.handlers[:] = [logs.LogHandler(full)]
        logs.OUR_LOGGER.propagate = False
        logging.getLogger("greenroom.x").warning("lost")
        print("lost too", file=sys.stderr)
        pid = forking.fork(lambda: 3, os.open(os.devnull, os.O_WRONLY), keep=())
        print("ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        os._exit(0)  # Python's own end would tell that stderr cannot be flushed
        """
    assert run_program(tmp_path, program) == "ended with 3\n"


def test_a_detached_child_has_a_name_of_its_own_and_outlives_who_forked_it(tmp_path):
    run_program(
        tmp_path,
        """
        import os, sys
        from greenroom.actors.runtime.records import show_title
        from greenroom.actors.runtime import forking
        from greenroom.actors.runtime.processes import command_line

        def be():
            os.read(began, 1)  # returns when who forked has ended
            show_title("child")
            print(command_line(os.getpid()), os.getcwd(), os.getsid(0) != sid, os.environ["HOME"])

        sid = os.getsid(0)
        began, _held = os.pipe()
        os.environ["HOME"] = "another than at first"
        output = os.open(sys.argv[1] + "/output", os.O_WRONLY | os.O_CREAT)
        ours = os.dup(1)  # so that who waits for what we print waits for the child
        forking.fork(be, output, keep=[began, ours], detached=True)
        """,
    )
    assert (tmp_path / "output").read_text() == "greenroom: child / True another than at first\n"


THREADS = """
import threading
from greenroom.actors.runtime import forking
assert forking.can_fork()
enough = threading.Event()
thread = threading.Thread(target=enough.wait)
thread.start()
assert not forking.can_fork()
enough.set()
"""


def test_only_a_process_without_other_threads_forks():
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=60)


def test_a_child_shows_whose_it_is_while_it_is_still_importing(tmp_path):
    text = """
        import gunicorn.util  # which looks for the memory of titles, and so hides the environment
        from pathlib import Path

        shows = b"GREENROOM_SYSTEM=" in Path("/proc/self/environ").read_bytes()
        main = lambda: print(shows)
    """
    (tmp_path / "child.py").write_text(textwrap.dedent(text), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", forking.PROGRAM, "child:main"],
        cwd=tmp_path,
        env={**os.environ, MARK: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
