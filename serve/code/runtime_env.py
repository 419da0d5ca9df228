"""A user's runtime_env, with its folders as zips: equal files make equal bytes, wherever packed.

Theory of operation. A whole folder travels, so files that code opens or imports later are there
too. Its modules are pickled as references (packing.py) and found in the zip. The zip is named by
its sha256: it is sent where that is not stored yet, kept while a backend or the latest history
needs it, and fetched once per host (actors/environments/folders.py). A zip of the user's is packed
anew, so that it is checked here, and equal to a folder of the same files.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from greenroom.core.config import RuntimeEnv, requirement_lines
from greenroom.core.errors import InvalidRequestError

MAX_ZIP_BYTES = 100 * 1024 * 1024
MAX_BYTES = 512 * 1024 * 1024  # of the files
LEFT_OUT = frozenset({"__pycache__", ".git", ".hg", ".svn", "node_modules"})
ZIPS = frozenset({".zip", ".whl"})
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can tell
_NAMED = 3  # how many of the largest files an error names


class Folder(NamedTuple):
    """A packed folder."""

    digest: str
    content: bytes


class PackedEnv(NamedTuple):
    """A runtime_env that names zips, those zips, and what these have for `import`."""

    env: RuntimeEnv
    folders: dict[str, bytes]  # zip by digest
    names: frozenset[str]  # of packages and modules at the top of the zips


def pack_env(env: RuntimeEnv) -> PackedEnv:
    """Pack what a runtime_env names by paths; InvalidRequestError where that cannot be."""
    work = None if env.working_dir is None else pack(Path(env.working_dir))
    modules = [pack_module(Path(path)) for path in env.py_modules]
    names: dict[str, Any] = {
        "working_dir": None if work is None else work.digest,
        "py_modules": tuple(module.digest for module in modules),
    }
    folders = modules if work is None else [work, *modules]
    changes = {name: value for name, value in names.items() if value}
    for installer in ("pip", "uv"):
        if isinstance(file := getattr(env, installer), str):
            changes[installer] = _requirements_in(installer, Path(file))
    return PackedEnv(
        env.model_copy(update=changes),
        dict(folders),
        frozenset(name for folder in folders for name in _names_in(folder.content)),
    )


def _names_in(content: bytes) -> Iterator[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for path in archive.namelist():
            top, is_below, _ = path.partition("/")
            if is_below or top.endswith(".py"):
                yield top.removesuffix(".py")


def _requirements_in(installer: str, file: Path) -> tuple[str, ...]:
    given = f"{installer}={str(file)!r}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{given}: no requirements file can be read: {error}") from error
    try:
        return requirement_lines(re.sub(r"\\\n", " ", text).splitlines())
    except ValueError as error:
        raise InvalidRequestError(f"{given}: {error}") from error


def pack(folder: Path) -> Folder:
    """Pack a folder or a zip; InvalidRequestError where it is neither, or too large.

    Left out of a folder are ``.pyc`` files, virtual environments, and folders named as in
    ``LEFT_OUT``. Its links must not lead out of it.
    """
    given = f"working_dir={str(folder)!r}"
    if not os.path.isdir(folder) and folder.suffix not in ZIPS:
        raise InvalidRequestError(f"{given}: no such folder")
    return _packed(given, folder, "")


def pack_module(path: Path) -> Folder:
    """Pack a package's folder, a module's file, a zip or a wheel, to be imported by its name."""
    return _packed(f"py_modules={str(path)!r}", path, f"{path.resolve().name}/")


class _File(NamedTuple):
    name: str  # in the zip
    size: int
    is_executable: bool
    read: Callable[[], bytes]


def _packed(given: str, path: Path, below: str) -> Folder:
    """Pack what is at a path; the names of a folder's files begin with ``below``."""
    with ExitStack() as stack:
        if os.path.isdir(path):  # unlike Path.is_dir, false for whatever text
            root = path.resolve()
            files = [_file(below + name, each) for name, each in files_in(given, root)]
        elif not os.path.isfile(path):
            raise InvalidRequestError(f"{given}: no such folder or file")
        elif below and path.suffix == ".py":
            files = [_file(path.name, path)]
        else:
            try:
                archive = stack.enter_context(zipfile.ZipFile(path))
            except (zipfile.BadZipFile, OSError) as error:
                raise InvalidRequestError(f"{given}: {error}") from error
            files = [_entry(archive, info) for info in archive.infolist() if not info.is_dir()]
        return _zip_of(given, sorted(files, key=lambda file: file.name))


def _file(name: str, path: Path) -> _File:
    status = path.stat()
    return _File(name, status.st_size, bool(status.st_mode & stat.S_IXUSR), path.read_bytes)


def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _File:
    is_executable = bool(info.external_attr >> 16 & stat.S_IXUSR)
    return _File(info.filename, info.file_size, is_executable, partial(archive.read, info))


def _zip_of(given: str, files: list[_File]) -> Folder:
    _check_size(given, "files", MAX_BYTES, [(file.size, file.name) for file in files])
    buffer, packed = io.BytesIO(), []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            info = zipfile.ZipInfo(file.name, _EPOCH)
            info.create_system = 3  # Unix, on which the mode counts
            info.external_attr = (stat.S_IFREG | (0o755 if file.is_executable else 0o644)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, file.read())
            packed.append((info.compress_size, file.name))
    content = buffer.getvalue()
    _check_size(given, "packed files", MAX_ZIP_BYTES, packed)
    return Folder(hashlib.sha256(content).hexdigest(), content)


def files_in(given: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name below ``root`` and the path of each file that travels.

    InvalidRequestError, which begins with ``given``, for a link out of it.
    """
    for base, folders, names in os.walk(root):
        here = Path(base)
        folders[:] = [name for name in folders if not _is_left_out(here / name)]
        for name in folders:
            if (here / name).is_symlink():
                _refuse_link(given, root, here / name, "is a link to a folder")
        for name in names:
            path = here / name
            if name.endswith(".pyc"):
                continue
            if path.is_symlink() and root not in path.resolve().parents:
                _refuse_link(given, root, path, "leads out of it")
            if path.is_file():  # no socket, pipe or device
                yield path.relative_to(root).as_posix(), path


def _is_left_out(folder: Path) -> bool:
    return folder.name in LEFT_OUT or (folder / "pyvenv.cfg").exists()


def _refuse_link(given: str, root: Path, link: Path, why: str) -> None:
    raise InvalidRequestError(
        f"{given}: {link.relative_to(root)} {why} ({os.readlink(link)}); put what it stands for in "
        "its place"
    )


def _check_size(given: str, what: str, limit: int, sizes: list[tuple[int, str]]) -> None:
    total = sum(size for size, _ in sizes)
    if total <= limit:
        return
    largest = ", ".join(
        f"{name} ({size / 2**20:.1f} MiB)" for size, name in sorted(sizes, reverse=True)[:_NAMED]
    )
    raise InvalidRequestError(
        f"{given}: its {what} have {total / 2**20:.1f} MiB, over the limit of "
        f"{limit / 2**20:.0f}; the largest are {largest}. Put large data where "
        "replicas can fetch it"
    )
