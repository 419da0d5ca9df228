"""Wheels for tests of environments, which must not need a package registry."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def write_wheel(folder: Path, name: str, version: str, code: str, requires: str = "") -> Path:
    """Write a wheel of one module; return its path."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    _write(path, info, files)
    return path


def _write(path: Path, info: str, files: Mapping[str, str | bytes]) -> None:
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name_in_zip, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name_in_zip, content)


def write_needed(folder: Path, *extras: str) -> None:
    """Write wheels of all that Greenroom needs with these extras, as they are installed here."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in set(_needed_by("greenroom", extras)):
        installed = metadata.distribution(name)
        listed = [each for each in installed.files or () if ".." not in each.parts]
        names = [str(each) for each in listed if each.suffix != ".pyc" and each.name != "RECORD"]
        files = {each: Path(str(installed.locate_file(each))).read_bytes() for each in names}
        info = next(each.parts[0] for each in listed if each.name == "METADATA")
        lines = files[f"{info}/WHEEL"].decode().splitlines()
        tag = next(line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: "))
        _write(folder / f"{info.removesuffix('.dist-info')}-{tag}.whl", info, files)


def _needed_by(name: str, extras: tuple[str, ...] = ()) -> Iterator[str]:
    for text in metadata.requires(name) or ():
        needed = Requirement(text)
        if needed.marker is None or any(
            needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield needed.name
            yield from _needed_by(needed.name, tuple(needed.extras))


def write_release(folder: Path, unpacked: Path, version: str) -> None:
    """Write a wheel of the release of Greenroom that :mod:`tests.support.releases` has unpacked."""
    info = f"greenroom-{version}.dist-info"
    described = metadata.distribution("greenroom")
    about = described.read_text("METADATA") or described.read_text("PKG-INFO") or ""
    packages = sorted((unpacked / "greenroom").rglob("*"))
    files: dict[str, str | bytes] = {
        str(path.relative_to(unpacked)): path.read_bytes()
        for path in packages
        if path.is_file() and path.suffix != ".pyc"
    }
    files[f"{info}/METADATA"] = about.replace(
        f"\nVersion: {described.version}", f"\nVersion: {version}"
    )
    files[f"{info}/entry_points.txt"] = described.read_text("entry_points.txt") or ""
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    _write(folder / f"greenroom-{version}-py3-none-any.whl", info, files)
