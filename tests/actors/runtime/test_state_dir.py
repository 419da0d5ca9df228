"""A state dir that another user could have written is refused, and ours is for nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime import state_dir
from greenroom.actors.runtime.logs import open_log
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.actors.runtime.state_dir import check_state_dir, make_private, write_private
from greenroom.http_front.access_log import AccessLog, Entry
from greenroom.serve.exceptions import StartError
from tests.support.another_user import NOBODY
from tests.support.systems import RunningSystem


@pytest.fixture
def state(tmp_path):
    """A state dir as a host leaves it."""
    state = tmp_path / "state"
    for folder in ("logs", "run", "store/controller/large", "folders/abc", "environments/a"):
        make_private(state / folder)
    for file in ("host.id", "status.json", "logs/access.log", "store/controller/large/a"):
        write_private(state / file, "x")
    return state


def refusal(state: Path) -> str:
    with pytest.raises(StartError) as refused:
        check_state_dir(state)
    text = str(refused.value)
    assert str(state) in text
    assert "--state-dir" in text
    return text


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_a_host_leaves_is_taken_and_so_is_what_is_not_there(state):
    check_state_dir(state)
    check_state_dir(state / "not" / "there")


def test_a_folder_of_another_user_is_refused(state):
    os.chown(state, NOBODY, NOBODY)
    assert f"it belongs to user {NOBODY}, and this is user {os.geteuid()}" in refusal(state)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_may_write_is_refused(state, mode):
    state.chmod(mode)
    found = refusal(state)
    assert f"mode is {mode:04o}" in found
    is_shared = mode == 0o1777  # such as /tmp, which nobody should make private
    assert ("chmod 700" in found, "give a folder in it" in found) == (not is_shared, is_shared)
    state.chmod(0o700)
    check_state_dir(state)


@pytest.mark.parametrize(
    "inside",
    [
        *("logs", "logs/access.log", "store/controller/large/a", "run"),
        *("environments", "environments/a"),
    ],
)
def test_what_another_user_left_in_it_is_refused(state, inside):
    os.chown(state / inside, NOBODY, NOBODY)
    found = refusal(state)
    assert str(state / inside) in found
    assert str(NOBODY) in found


@pytest.mark.parametrize("inside", ["logs/access.log", "logs", "store", "host.id", "run/x.json"])
def test_a_link_in_it_is_refused(state, tmp_path, inside):
    aim = tmp_path / "aim"
    aim.write_text("x")
    link = state / inside
    if link.exists():
        link.rename(tmp_path / "before")
    link.symlink_to(aim)
    assert f"{link} in it is a link" in refusal(state)


def test_a_fifo_in_place_of_a_log_is_refused(state):
    os.mkfifo(state / "logs/proxy.log", 0o600)
    assert "no plain file" in refusal(state)


def test_what_others_may_write_is_refused_where_they_could_get_there(state):
    (state / "host.id").chmod(0o666)
    state.chmod(0o755)
    assert "host.id in it (its mode is 0666)" in refusal(state)
    state.chmod(0o700)
    check_state_dir(state)
    assert mode_of(state / "host.id") == 0o600


def test_what_others_could_read_is_made_private(state):
    for path in (state, *state.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    check_state_dir(state)
    found = {str(path.relative_to(state)): mode_of(path) for path in (state, *state.rglob("*"))}
    expected = {name: 0o700 if (state / name).is_dir() else 0o600 for name in found}
    assert found == expected


def test_what_is_not_ours_is_left_alone(state):
    theirs = state / "lost+found"
    theirs.mkdir()
    theirs.chmod(0o755)
    os.chown(theirs, NOBODY, NOBODY)
    users = state / "folders" / "abc" / "link"  # of code that runs as this user
    users.symlink_to("/")
    state.chmod(0o755)
    check_state_dir(state)
    assert (mode_of(theirs), mode_of(state)) == (0o755, 0o755)


@pytest.fixture
def below():
    """Give a state dir in a folder of that mode and owner."""
    with tempfile.TemporaryDirectory() as top:

        def make(mode: int, owner: int) -> Path:
            parent = Path(top) / "parent"
            make_private(parent / "state")
            os.chown(parent, owner, owner)
            parent.chmod(mode)
            return parent / "state"

        yield make


def test_a_parent_that_all_may_write_is_refused_unless_it_is_sticky(below):
    state = below(0o777, os.geteuid())
    assert "without the sticky bit" in refusal(state)
    state.parent.chmod(0o1777)
    check_state_dir(state)


@pytest.mark.parametrize(
    ("members", "primary", "strangers"),
    [
        ([], ["me"], ""),  # the group that many systems make for each user
        (["me", "root"], [], ""),
        (None, [], ""),  # that of a volume, of which nothing else is known
        (["me", "eve"], [], "eve"),
        ([], ["me", "bob", "eve"], "bob, eve"),
    ],
)
def test_a_parent_that_a_group_may_write_is_refused_if_other_users_are_in_the_group(
    below, monkeypatch, members, primary, strangers
):
    state = below(0o775, os.geteuid())
    gid = state.parent.stat().st_gid
    known = {} if members is None else {gid: SimpleNamespace(gr_mem=members)}
    uids = {"root": 0, "me": os.geteuid(), "bob": 1_000_001, "eve": 1_000_002}
    users = [
        SimpleNamespace(pw_name=name, pw_uid=uid, pw_gid=gid if name in primary else 1_000_000)
        for name, uid in uids.items()
    ]
    monkeypatch.setattr(state_dir.grp, "getgrgid", known.__getitem__)
    monkeypatch.setattr(state_dir.pwd, "getpwall", lambda: users)
    if not strangers:
        check_state_dir(state)
        return
    found = refusal(state)
    assert f"group {gid}, with {strangers} in it, may write {state.parent}" in found
    assert f"`chmod g-w {state.parent}`" in found
    state.parent.chmod(0o1775)
    check_state_dir(state)


def test_a_parent_of_another_user_is_refused_also_behind_a_link(below, tmp_path):
    state = below(0o755, NOBODY)
    assert f"{state.parent}, which it is in, belongs to user {NOBODY}" in refusal(state)
    link = tmp_path / "link"
    link.symlink_to(state)
    assert "belongs to user" in refusal(link)


def test_a_link_of_another_user_is_no_state_dir(state, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(state)
    check_state_dir(link)
    os.lchown(link, NOBODY, NOBODY)
    assert "belongs to user" in refusal(link)


def test_neither_start_nor_stop_believes_a_folder_of_another_user(state):
    os.chown(state, NOBODY, NOBODY)
    settings = read_settings({}, state_dir=str(state))
    for act in (system.start, system.stop):
        with pytest.raises(StartError, match="belongs to user"):
            act(settings)


def test_logs_are_not_written_through_links(tmp_path):
    settings: HostSettings = read_settings({}, state_dir=str(tmp_path))
    make_private(settings.logs_dir)
    aim = tmp_path / "aim"
    aim.write_text("")
    for name in ("controller", "access"):
        (settings.logs_dir / f"{name}.log").symlink_to(aim)
    with pytest.raises(OSError, match="symbolic link"):
        open_log(settings, "controller")
    asyncio.run(add_a_line(AccessLog(settings.logs_dir / "access.log")))
    assert aim.read_text() == ""


async def add_a_line(log: AccessLog) -> None:
    log.add(Entry(0.0, "r", "GET", "/", 200, 0.1, 1, None))
    log.flush()


def test_all_that_a_host_writes_is_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        running = RunningSystem(tmp_path / "new" / "state", GREENROOM_BIND="127.0.0.7")
        running.start()
        try:
            running.get("/-/routes")
            state = running.settings.state_dir
            found: dict[str, int] = {}
            for path in (state, *state.rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # half-written, and whole by now
                    found[str(path)] = mode_of(path)
        finally:
            running.stop()
    finally:
        os.umask(before)
    assert len(found) > 15
    open_to_others = {path: oct(mode) for path, mode in found.items() if mode & 0o077}
    assert not open_to_others
