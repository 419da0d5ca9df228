"""A folder of the user's as a zip: equal files make equal bytes, wherever and whenever packed.

Theory of operation. The whole folder travels, so files that code opens or imports later are there
too. Its modules are pickled as references (packing.py) and found in the zip. The zip is named by
its sha256: it is sent where that is not stored yet, kept while a backend or the latest history
needs it, and fetched once per host (actors/replica/folders.py).
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from greenroom.core.errors import InvalidRequestError

MAX_ZIP_BYTES = 100 * 1024 * 1024
MAX_BYTES = 512 * 1024 * 1024  # of the files
LEFT_OUT = frozenset({"__pycache__", ".git", ".hg", ".svn", "node_modules"})
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can tell
_NAMED = 3  # how many of the largest files an error names


class Folder(NamedTuple):
    """A packed folder."""

    digest: str
    content: bytes


def pack(folder: Path) -> Folder:
    """Pack a folder; InvalidRequestError where it is none, too large, or links lead out of it.

    Left out are ``.pyc`` files, virtual environments, and folders named as in ``LEFT_OUT``.
    """
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for whatever text
        raise InvalidRequestError(f"working_dir={str(folder)!r}: no such folder")
    root = folder.resolve()
    files = sorted(_files(root))
    _check_size(folder, "files", MAX_BYTES, [(path.stat().st_size, path) for _, path in files])
    buffer, packed = io.BytesIO(), []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files:
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = 3  # Unix, on which the mode counts
            executable = path.stat().st_mode & stat.S_IXUSR
            info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
            packed.append((info.compress_size, path))
    content = buffer.getvalue()
    _check_size(folder, "packed files", MAX_ZIP_BYTES, packed)
    return Folder(hashlib.sha256(content).hexdigest(), content)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name in the zip and the path of each file."""
    for base, folders, names in os.walk(root):
        here = Path(base)
        folders[:] = [name for name in folders if not _is_left_out(here / name)]
        for name in folders:
            if (here / name).is_symlink():
                _refuse_link(root, here / name, "is a link to a folder")
        for name in names:
            path = here / name
            if name.endswith(".pyc"):
                continue
            if path.is_symlink() and root not in path.resolve().parents:
                _refuse_link(root, path, "leads out of it")
            if path.is_file():  # no socket, pipe or device
                yield path.relative_to(root).as_posix(), path


def _is_left_out(folder: Path) -> bool:
    return folder.name in LEFT_OUT or (folder / "pyvenv.cfg").exists()


def _refuse_link(root: Path, link: Path, why: str) -> None:
    raise InvalidRequestError(
        f"working_dir={str(root)!r}: {link.relative_to(root)} {why} ({os.readlink(link)}); put "
        "what it stands for in its place"
    )


def _check_size(folder: Path, what: str, limit: int, sizes: list[tuple[int, Path]]) -> None:
    total = sum(size for size, _ in sizes)
    if total <= limit:
        return
    largest = ", ".join(
        f"{path.relative_to(folder.resolve())} ({size / 2**20:.1f} MiB)"
        for size, path in sorted(sizes, reverse=True)[:_NAMED]
    )
    raise InvalidRequestError(
        f"working_dir={str(folder)!r}: its {what} have {total / 2**20:.1f} MiB, over the limit of "
        f"{limit / 2**20:.0f}; the largest are {largest}. Put large data where "
        "replicas can fetch it"
    )
