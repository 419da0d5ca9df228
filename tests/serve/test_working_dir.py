"""A folder as a zip: the same for the same files, and nothing in it that must not be."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica import folders
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.code import working_dir
from greenroom.serve.code.working_dir import pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / "package").mkdir(parents=True)
    (made / "main.py").write_text("WORD = 'one'\n")
    (made / "package" / "data.bin").write_bytes(bytes(range(256)) * 10)
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    return made


def names(content: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.namelist()


def test_the_same_files_are_the_same_zip_whenever_and_wherever(folder: Path) -> None:
    first = pack(folder)
    os.utime(folder / "main.py", (1, 1))
    (folder / "package" / "data.bin").chmod(0o600)
    copy = folder.with_name("copy")
    os.rename(folder, copy)
    assert pack(copy) == first
    (copy / "main.py").write_text("WORD = 'two'\n")
    assert pack(copy).digest != first.digest


def test_what_is_made_by_tools_is_left_out(folder: Path) -> None:
    for name in ("__pycache__", ".git", "env"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "old.pyc").write_text("")
    os.mkfifo(folder / "pipe")
    assert names(pack(folder).content) == ["main.py", "package/data.bin", "run.sh"]


def test_links_that_stay_inside_are_what_they_stand_for_and_others_are_refused(
    folder: Path,
) -> None:
    (folder / "again.py").symlink_to("main.py")
    assert "again.py" in names(pack(folder).content)
    (folder / "secret").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequestError, match=r"secret leads out of it \(/etc/passwd\)"):
        pack(folder)
    (folder / "secret").unlink()
    (folder / "other").symlink_to("package")
    with pytest.raises(InvalidRequestError, match="other is a link to a folder"):
        pack(folder)


def test_a_folder_that_is_missing_or_too_large_is_refused_naming_the_largest_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequestError, match="nowhere': no such folder"):
        pack(folder / "nowhere")
    monkeypatch.setattr(working_dir, "MAX_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match=r"its files have .*largest are package/data.bin"):
        pack(folder)
    monkeypatch.undo()
    monkeypatch.setattr(working_dir, "MAX_ZIP_BYTES", 100)
    with pytest.raises(InvalidRequestError, match=r"its packed files have .* over the limit"):
        pack(folder)


def test_it_is_unpacked_as_it_was(folder: Path, tmp_path: Path) -> None:
    packed = pack(folder)
    store = tmp_path / "folders"
    store.mkdir()
    path = folders.unpack(packed.content, packed.digest, store)
    assert path == store / packed.digest
    assert pack(path) == packed
    assert os.access(path / "run.sh", os.X_OK)
    assert [each.name for each in store.iterdir()] == [packed.digest]


def zipped(name: str, *, mode: int = 0, content: str = "x") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (zipped("../evil.py"), "would lie outside"),
        (zipped("a/../../evil.py"), "would lie outside"),
        (zipped("/etc/evil"), "would lie outside"),
        (zipped("a\\..\\evil"), "would lie outside"),
        (zipped("link", mode=0o120777, content="/etc/passwd"), "is no plain file"),
        (b"no zip at all", "not a zip file"),
    ],
)
def test_no_zip_writes_elsewhere_or_leaves_anything(
    content: bytes, told: str, tmp_path: Path
) -> None:
    store = tmp_path / "folders"
    store.mkdir()
    with pytest.raises((ValueError, zipfile.BadZipFile), match=told):
        folders.unpack(content, hashlib.sha256(content).hexdigest(), store)
    assert list(store.iterdir()) == []
    assert [each.name for each in tmp_path.iterdir()] == ["folders"]


def test_what_is_not_the_zip_that_was_asked_for_or_too_much_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(folder)
    with pytest.raises(ValueError, match="is not the zip"):
        folders.unpack(packed.content + b"x", packed.digest, tmp_path)
    monkeypatch.setattr(folders, "MAX_BYTES", 1000)  # whatever it says of itself
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        folders.unpack(packed.content, packed.digest, tmp_path)


def test_folders_that_nobody_uses_are_removed_after_a_while(tmp_path: Path) -> None:
    for name in ("used", "unused", "new"):
        (tmp_path / name).mkdir()
    for name in ("used", "unused"):
        os.utime(tmp_path / name, (1, 1))
    folders.prune(tmp_path, lambda: {"used"})
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["new", "used"]
    folders.prune(tmp_path / "nothing", set)


@pytest.mark.parametrize("given", [{"runtime_env": {"working_dir": "."}}, {"working_dir": "."}])
def test_who_names_it_elsewhere_is_told_where(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"serve.run\(working_dir=...\)"):
        serve.deployment(ray_actor_options=given)(lambda: None)
