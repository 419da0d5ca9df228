"""The state dir: the check that only this user can have written it, and private files in it.

Theory of operation. The state dir decides what runs: the store holds pickles, run/ the processes
that a stop kills, and logs are appended to under whatever name is there. So a user who can write it
has the rights of this user. Before anything in it is used, the folder and its content must belong
to this user, no other user may be able to write it or to put another in its place, and there must
be no links in it. What others could only read is made private, unless the folder holds other
things too.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from greenroom.core.errors import StartError

_ROOT = 0
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_OTHERS_ENTER = 0o011
_ALL_USERS = ["0", "0", "4294967295"]  # the map of a user namespace that has them all
# What we leave in a state dir; anything else in it is not ours to judge.
_FOLDERS = ("store", "run", "logs", "folders", "environments")
_FILES = ("cluster.key", "status.", "host.", "store.")
# What users' code or an installer fills, with links too: only what is right below is looked at.
_FILLED = ("folders", "environments")


def check_state_dir(folder: Path) -> None:
    """Raise StartError where other users could have written a state dir, or could replace it.

    A folder that does not exist is fine. Its content may change meanwhile.
    """
    for parent in reversed(folder.parents):
        _check_on_the_way(folder, parent)
    for parent in reversed(Path(os.path.realpath(folder)).parents):
        _check_on_the_way(folder, parent)
    try:
        found, own = folder.stat(), folder.lstat()
    except OSError:  # not there, or not to be entered: then using it says so
        return
    if not stat.S_ISDIR(found.st_mode):
        return  # using it says so
    for each in (found, own):
        if each.st_uid != os.geteuid():
            _refuse(folder, f"it belongs to user {each.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & stat.S_ISVTX and found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        _refuse(folder, f"it is for all users (its mode is {mode:04o}): give a folder in it")
    if found.st_mode & _OTHERS_WRITE:
        _refuse(
            folder,
            f"others may write it (its mode is {stat.S_IMODE(found.st_mode):04o}): if you trust "
            f"what is in it, `chmod 700 {folder}`",
        )
    _check_content(folder, is_open=bool(found.st_mode & _OTHERS_ENTER))


def _check_content(folder: Path, *, is_open: bool) -> None:
    private: list[tuple[str, int]] = []
    for path, found in _ours_in(folder):
        kind = stat.S_IFMT(found.st_mode)
        if found.st_uid != os.geteuid():
            _refuse(folder, f"{path} in it belongs to user {found.st_uid}, not {os.geteuid()}")
        if kind not in {stat.S_IFREG, stat.S_IFDIR}:
            what = "a link" if kind == stat.S_IFLNK else "no plain file or folder"
            _refuse(folder, f"{path} in it is {what}: remove it")
        mode = stat.S_IMODE(found.st_mode)
        if is_open and mode & _OTHERS_WRITE:
            _refuse(
                folder,
                f"others may write {path} in it (its mode is {mode:04o}): if you trust it, "
                f"`chmod -R go= {folder}`",
            )
        if mode & _OTHERS:
            private.append((path, mode & ~_OTHERS))
    if is_open and all(map(_is_ours, os.listdir(folder))):
        private.append((str(folder), 0o700))
    for path, mode in private:
        with contextlib.suppress(OSError):  # a read-only disk, or it is gone
            os.chmod(path, mode)


def _ours_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all that is ours in a state dir, except what folders and environments hold."""
    unread, filled = [str(folder)], {str(folder / name) for name in _FILLED}
    while unread:
        where = unread.pop()
        is_top = where == str(folder)
        try:
            entries = list(os.scandir(where))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StartError(f"the state dir {folder} cannot be used: {error}") from None
        for entry in entries:
            if is_top and not _is_ours(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield entry.path, found
                if stat.S_ISDIR(found.st_mode) and where not in filled:
                    unread.append(entry.path)


def check_own(folder: Path) -> None:
    """Raise PermissionError where another user owns a folder or may write it.

    For each use of what a replica runs: it may have changed since the start.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is no folder: remove it")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}, and this is user {os.geteuid()}: remove it"
        )
    if found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"others may write {folder} (its mode is {mode:04o}): remove it, or if you trust what "
            f"is in it, `chmod 700 {folder}`"
        )


def _is_ours(name: str) -> bool:
    return name in _FOLDERS or name.startswith(_FILES)


def _check_on_the_way(folder: Path, parent: Path) -> None:
    """Refuse a state dir that another user than root could replace by one of theirs."""
    try:
        found = parent.lstat()
    except OSError:  # it is to be made, or using it says what is wrong
        return
    if found.st_uid not in {_ROOT, os.geteuid()} and _sees_all_users():
        _refuse(folder, f"{parent}, which it is in, belongs to user {found.st_uid}")
    is_sticky = found.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(found.st_mode) or is_sticky:
        return
    if found.st_mode & stat.S_IWOTH:
        _refuse(folder, f"all users may write {parent}, which it is in, without the sticky bit")
    if found.st_mode & stat.S_IWGRP and (strangers := _strangers_in(found.st_gid)):
        who = ", ".join(strangers[:3])
        _refuse(
            folder,
            f"group {found.st_gid}, with {who} in it, may write {parent}, which it is in, without "
            f"the sticky bit: `chmod g-w {parent}`",
        )


def _strangers_in(gid: int) -> list[str]:
    """Return the users of a group but for this one and root.

    A group of the user's own has none, nor has one that only a volume has, as on Kubernetes.
    """
    with contextlib.suppress(KeyError):
        members, users = set(grp.getgrgid(gid).gr_mem), pwd.getpwall()
        members.update(each.pw_name for each in users if each.pw_gid == gid)
        ours = {each.pw_name for each in users if each.pw_uid in {_ROOT, os.geteuid()}}
        return sorted(members - ours)
    return []


def _sees_all_users() -> bool:
    """Return whether all uids are mapped; a rootless container shows root's files as unmapped."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _ALL_USERS
    except OSError:
        return True


def _refuse(folder: Path, reason: str) -> NoReturn:
    raise StartError(
        f"the state dir {folder} is not safe to use: {reason}. Anyone who can write there can run "
        "code as this user: choose another with --state-dir or --store, or run this as its owner"
    )


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, and those it is in, where they are missing."""
    for each in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            if not each.exists():
                each.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(folder))


def open_private(path: Path) -> int:
    """Open a file for appending that only this user may read, and no link; return a descriptor."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)  # it may have been there before
    return fd


def being_written(path: Path) -> Path:
    """Return what :meth:`write_private` leaves where it is killed."""
    return path.with_name(f"{path.name}.new")


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, in one step; with one writer at a time."""
    temporary = being_written(path)
    temporary.unlink(missing_ok=True)  # of one that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
