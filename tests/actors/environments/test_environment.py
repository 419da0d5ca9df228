"""Virtual environments of replicas: made once, shared, left whole by kills, removed when unused."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import typing_extensions

from greenroom import serve
from greenroom.actors.environments import environment as environments
from greenroom.actors.environments.environment import COMPLETE, Environment
from greenroom.actors.environments.folders import try_lock
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.config import RuntimeEnv
from greenroom.serve.exceptions import DeployFailedError
from tests.support.another_user import NOBODY
from tests.support.systems import PATIENCE, alive, running_system, wait_until
from tests.support.wheels import write_wheel

pytestmark = pytest.mark.slow
DEADLINE_S = 10 * PATIENCE


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "parrot", "1.0", "WORD = 'one'\n")
    write_wheel(folder, "parrot", "2.0", "WORD = 'two'\n")
    write_wheel(folder, "greedy", "1.0", "", requires="pydantic==1.0")
    write_wheel(folder, "pydantic", "1.0", "")
    write_wheel(folder, "pydantic", "2.99", "def no(: pass\n")
    # What replicas are forked from has loaded the host's.
    loaded = Path(typing_extensions.__file__).read_text()
    write_wheel(folder, "typing_extensions", "99.0", f"{loaded}\nWORD = 'its own'\n")
    return folder


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("environments") / "state") as running:
        yield running


@serve.deployment
class Parrot:
    def __init__(self) -> None:
        import parrot  # type: ignore[import-not-found]  # noqa: PLC0415  # of its environment

        self.word = parrot.WORD
        logging.getLogger().addHandler(logging.NullHandler())  # which Thespian's root refuses

    def __call__(self) -> dict[str, Any]:
        import typing_extensions  # noqa: PLC0415  # of its environment, or the host's

        program = "import parrot, greenroom.core; print(parrot.WORD)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        return {
            "word": self.word,
            "in a program": done.stdout.decode().strip(),
            "where": os.environ["VIRTUAL_ENV"],
            "prefix": sys.prefix,
            "typing_extensions": getattr(typing_extensions, "WORD", "the host's"),
        }


def with_env(replicas: int = 1, **env: Any) -> Any:
    options = {"num_replicas": replicas, "max_constructor_retry_count": 1}
    return Parrot.options(actor_options={"runtime_env": env}, **options).bind()  # type: ignore[arg-type]


def lines(wheels: Path, *requirements: str) -> list[str]:
    return ["--no-index", f"--find-links {wheels}", *requirements]


def test_replicas_share_one_environment_and_another_version_is_another(system, wheels, tmp_path):
    with system.as_default():
        needed = lines(wheels, "parrot==1.0", "typing_extensions==99.0")
        handle = serve.run(with_env(3, pip=needed), route_prefix=None)
        found = [handle.remote().result(20) for _ in range(6)]
        assert {each["word"] for each in found} == {"one"}
        assert {each["in a program"] for each in found} == {"one"}
        assert len({each["where"] for each in found}) == 1
        assert {each["prefix"] for each in found} == {found[0]["where"]}
        assert {each["typing_extensions"] for each in found} == {"its own"}
        file = tmp_path / "requirements.txt"
        file.write_text("# the newest\n" + "\n".join(lines(wheels, "parrot \\\n  >= 1")) + "\n\n")
        handle = serve.run(with_env(pip=str(file)), route_prefix=None)
        found = [handle.remote().result(20)]
        assert (found[0]["word"], found[0]["typing_extensions"]) == ("two", "the host's")
    made = [p for p in system.settings.environments_dir.iterdir() if (p / COMPLETE).exists()]
    assert len([path for path in made if not path.name.startswith("pip-")]) == 2


def test_what_cannot_be_installed_is_the_reason_and_names_the_package(system, wheels):
    with system.as_default():
        absent = with_env(2, pip=lines(wheels, "no-such-package"))
        with pytest.raises(DeployFailedError, match=r"pip failed: .*no-such-package"):
            serve.run(absent, name="absent", route_prefix=None)
        report = json.dumps(system.status()["applications"]["absent"])
        assert "no-such-package" in report
        # Nor what Greenroom itself needs, in a version that it cannot use.
        greedy = with_env(pip=lines(wheels, "greedy"))
        with pytest.raises(DeployFailedError, match=r"greedy 1.0 depends on pydantic==1.0"):
            serve.run(greedy, name="contradicts", route_prefix=None)
        broken = with_env(pip=lines(wheels, "pydantic==2.99"))
        with pytest.raises(DeployFailedError, match=r"importing Greenroom .*def no\(: pass"):
            serve.run(broken, name="broken", route_prefix=None)
    left = {path.name for path in system.settings.environments_dir.iterdir() if path.is_dir()}
    assert all((system.settings.environments_dir / name / COMPLETE).exists() for name in left)


# --- Without a system -----------------------------------------------------------------------------


FAKE_UV = """#!/bin/sh
echo "$@" >> {log}
echo started
while test -e {gate}; do sleep 0.01; done
test -e {broken} || exit 0
echo '  x No solution found:'
echo '  because broken was not found'
exit 1
"""


Install = Callable[[Path], "Future[None]"]


@pytest.fixture
def uv(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    files = {name: tmp_path / name for name in ("log", "gate", "broken")}
    program.write_text(FAKE_UV.format(**files))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return tmp_path


@pytest.fixture
def install():
    """Return what begins to make an environment, on the loop of a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def begin(folder: Path) -> Future[None]:
        """Return when it has begun."""
        made = asyncio.run_coroutine_threadsafe(
            environments.prepare(folder, "uv", ("parrot",)), loop
        )
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(DEADLINE_S)
        return made

    yield begin
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_one_that_waits_finds_what_the_other_made_or_shares_its_failure(uv, install):
    def begin_two(name: str, runs: int) -> list[Future[None]]:
        """Begin two while the installer runs for the first, and let it end."""
        (uv / "gate").touch()
        first = install(uv / "environments" / name)
        wait_until(
            lambda: (uv / "log").exists() and (uv / "log").read_text().count("\n") == runs,
            10,
            "the installer runs",
        )
        both = [first, install(uv / "environments" / name)]
        (uv / "gate").unlink()
        return both

    for made in begin_two("a", 1):
        made.result(DEADLINE_S)
    folder = uv / "environments" / "a"
    (arguments,) = (uv / "log").read_text().splitlines()
    assert arguments.startswith(f"pip install --python {folder}/bin/python -r ")
    assert "pydantic>=" in (folder / "constraints.txt").read_text()
    (uv / "broken").touch()
    third, fourth = (made.exception(DEADLINE_S) for made in begin_two("b", 2))
    assert isinstance(third, DeployFailedError)
    assert str(third) == str(fourth)
    assert "uv failed: started; x No solution found:; because broken was not found" in str(third)
    assert len((uv / "log").read_text().splitlines()) == 2
    (uv / "broken").unlink()
    install(uv / "environments" / "b").result(DEADLINE_S)  # that has not waited for the failure


KILLED = """
import asyncio, sys
from pathlib import Path
from greenroom.actors.environments.environment import prepare
asyncio.run(prepare(Path(sys.argv[1]), 'uv', ('parrot',)))
"""


def test_a_killed_one_leaves_nothing_half_and_its_installer_nothing_behind(uv, install):
    folder = uv / "environments" / "a"
    (uv / "gate").touch()
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)])
    wait_until((uv / "log").exists, 10, "the installer runs")
    process.send_signal(signal.SIGKILL)
    process.wait()
    made = install(folder)
    assert try_lock(folder) is None, "the installer that is left holds the lock"
    (uv / "gate").unlink()
    made.result(DEADLINE_S)
    assert (folder / COMPLETE).exists()
    assert len((uv / "log").read_text().splitlines()) == 2, "what was not marked is made anew"


@pytest.mark.parametrize("planted", ["environments", "environments/a"])
def test_what_others_planted_or_may_write_is_not_run(uv, install, planted):
    folder = uv / "environments" / "a"
    folder.mkdir(parents=True)
    (folder / COMPLETE).touch()
    (uv / planted).chmod(0o777)
    with pytest.raises(DeployFailedError, match="its mode is 0777") as refused:
        install(folder).result(DEADLINE_S)
    assert f"others may write {uv / planted} (" in str(refused.value)
    (uv / planted).chmod(0o700)
    install(folder).result(DEADLINE_S)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(uv / planted, NOBODY, NOBODY)
    with pytest.raises(DeployFailedError, match=f"{uv / planted} belongs to user {NOBODY}"):
        install(folder).result(DEADLINE_S)


SLOW_UV = """#!/bin/sh
echo "$@" >> {log}
sleep 1000 &
echo $! > {child}
echo ERROR: still waiting for the index
wait
"""


def test_an_installer_that_takes_too_long_is_ended_with_what_it_started(uv, install, monkeypatch):
    (uv / "bin" / "uv").write_text(SLOW_UV.format(log=uv / "log", child=uv / "child"))
    monkeypatch.setattr(environments, "TIMEOUT_S", 2)
    folder = uv / "environments" / "a"
    with pytest.raises(DeployFailedError) as failed:
        install(folder).result(DEADLINE_S)
    message = "uv did not end within 2 s: ERROR: still waiting for the index"
    assert (str(failed.value), folder.exists()) == (message, False)
    child = int((uv / "child").read_text())
    wait_until(lambda: not alive(child), 5, "the end of what it started")


def test_what_an_installer_leaves_running_holds_nothing_up(uv, install):
    (uv / "bin" / "uv").write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {uv / 'child'}\n")
    folder = uv / "environments" / "a"
    try:
        install(folder).result(DEADLINE_S)
        lock = try_lock(folder)
        assert lock is not None
        os.close(lock)
    finally:
        os.kill(int((uv / "child").read_text()), signal.SIGKILL)


def test_an_installer_whose_replica_was_killed_gives_the_lock_back_in_time(uv, install):
    (uv / "bin" / "uv").write_text(SLOW_UV.format(log=uv / "log", child=uv / "child"))
    folder = uv / "environments" / "a"
    limited = "from greenroom.actors.environments import environment as it; it.TIMEOUT_S = 2"
    program = f"{limited}\n{KILLED}"
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)])
    wait_until((uv / "child").exists, 10, "the installer runs")
    process.send_signal(signal.SIGKILL)
    process.wait()
    (uv / "bin" / "uv").write_text("#!/bin/sh\n")
    made = install(folder)
    assert try_lock(folder) is None, "the installer that is left holds the lock"
    made.result(DEADLINE_S)
    assert not alive(int((uv / "child").read_text()))


def test_what_status_shows_of_an_installation_has_no_password(tmp_path, monkeypatch):
    shown = []

    async def prepare(*_: Any) -> None:
        shown.append(environment.trouble)

    monkeypatch.setattr(environments, "prepare", prepare)
    monkeypatch.setattr(environments, "enter", lambda _: None)
    settings = read_settings({"GREENROOM_STATE_DIR": str(tmp_path)})
    env = RuntimeEnv(pip=["--index-url https://me:secret@host/simple", "parrot"])
    environment = Environment(settings, env, lambda _: None)
    asyncio.run(environment.enter_packages())
    assert shown == ["pip installs --index-url https://***@host/simple, parrot"]


def test_a_host_without_uv_says_so(tmp_path, install, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeployFailedError, match="uv is not installed on this host"):
        install(tmp_path / "a").result(DEADLINE_S)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def six(tmp_path):
    """A folder with environments e0 to e5, each used a second after the one before; e0 is half."""
    for number in range(6):
        (tmp_path / f"e{number}").mkdir()
        if number:
            (tmp_path / f"e{number}" / COMPLETE).touch()
        os.utime(tmp_path / f"e{number}", (number, time.time() - 100 + number))
    return tmp_path


def folders(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.is_dir())


def test_unused_environments_go_but_for_the_last(six):
    for name in ("e1.lock", "failed.failure", "failed.lock"):
        (six / name).touch()
    environments.prune(six, lambda: {"e1"})
    assert folders(six) == ["e1", "e3", "e4", "e5"], "one in use, and the three used last"
    assert [path.name for path in six.iterdir() if path.is_file()] == ["e1.lock"]
    environments.prune(six / "nothing", list)


def test_what_cannot_be_removed_does_not_keep_the_others(six, monkeypatch):
    remove = shutil.rmtree

    def fails_for_one(path: Path, ignore_errors: bool = False) -> None:
        if path.name != "e1":
            remove(path)
        elif not ignore_errors:
            raise OSError("a file is in use")

    monkeypatch.setattr(shutil, "rmtree", fails_for_one)
    environments.prune(six, list)
    assert folders(six) == ["e1", "e3", "e4", "e5"]
