"""The file of ``greenroom up``: hosts with their settings, wheels, and applications."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field, ValidationError, field_validator

from greenroom.actors.runtime.settings import FIELDS, read_settings, variable
from greenroom.core.errors import InvalidRequestError
from greenroom.core.validation import Place, Settings, suggestion
from greenroom.serve.config_file import ConfigFile
from greenroom.serve.schema import InvalidDocumentError
from greenroom.serve.up.on_host import sha256

_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
# Settings that follow from the file itself.
_SET = ("state_dir", "address", "key_file", "bind", "join", "host_name")


DEFAULT_PORT = FIELDS["admin_port"].default


class _OfHosts(Settings):
    hints: ClassVar[Mapping[str, str]] = {
        "user": "write ssh: USER@HOST",
        "port": "name it in ~/.ssh/config, or write ssh: ssh://USER@HOST:PORT",
    }

    dir: str | None = Field(default=None, min_length=1)
    python: str | None = Field(default=None, min_length=1)
    settings: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _can_be_set_here(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in settings:
            if name in _SET:
                raise ValueError(f"{name} follows from the rest of the file; leave it out")
            if name not in FIELDS:
                meant = suggestion(name, FIELDS) or "; they are the flags of `greenroom start`"
                raise ValueError(f"{name}: no such setting{meant}")
        return settings


class HostEntry(_OfHosts):
    """One host: the IPv4 address that the others reach it by, and how SSH does."""

    address: str
    ssh: str = ""


class _Document(_OfHosts):
    hosts: dict[str, HostEntry] = Field(min_length=1)
    wheels: Path
    deploy: Path | None = None
    app_dir: Path | None = None


class Target(NamedTuple):
    """Where a host's folder is, and how it is reached."""

    name: str
    ssh: str
    dir: str
    python: str


class WantedHost(NamedTuple):
    """One host as it is to be."""

    target: Target
    environ: dict[str, str]  # of its settings
    release: str  # the version, and the hash of the wheels and of what Python it is for

    @property
    def generation(self) -> str:
        """The release with the settings; it begins with the release's name and a dash."""
        return f"{self.release}-{_hash(self.environ)}"


class HostsFile:
    """A file that was read; InvalidRequestError, with line and column, for what is wrong in it.

    Paths in it are relative to its folder.
    """

    def __init__(self, path: Path) -> None:
        file = ConfigFile(path)
        with file.located():
            try:
                self._document = _Document.model_validate(file.document)
            except ValidationError as error:
                raise InvalidDocumentError.of(error, _Document) from None
            if wrong := list(self._wrong_settings()):
                raise InvalidDocumentError(wrong)
        folder = path.absolute().parent
        self._wheels_dir = folder / self._document.wheels
        self.deploy = folder / self._document.deploy if self._document.deploy else None
        if self.deploy is not None and not self.deploy.is_file():
            raise InvalidRequestError(f"{path}: deploy: there is no file {self.deploy}")
        below = folder / (self._document.app_dir or (self.deploy or folder / "-").parent)
        if self.deploy is not None and not self.deploy.is_relative_to(below):
            raise InvalidRequestError(
                f"{path}: deploy: {self.deploy} is not below app_dir, {below}"
            )
        self.app_dir = below

    @property
    def leads(self) -> str:
        """The name of the first host."""
        return next(iter(self._document.hosts))

    @cached_property
    def wheels(self) -> Wheels:
        """The wheels; InvalidRequestError where these are no release."""
        return Wheels(self._wheels_dir)

    @property
    def targets(self) -> dict[str, Target]:
        """The hosts by name, as they are reached."""
        of_all = self._document
        return {
            name: Target(
                name,
                host.ssh or host.address,
                host.dir or of_all.dir or "~/greenroom",
                host.python or of_all.python or "python3",
            )
            for name, host in of_all.hosts.items()
        }

    @cached_property
    def hosts(self) -> dict[str, WantedHost]:
        """The hosts by name, as they are to be; InvalidRequestError as ``wheels``."""
        found = {}
        for name, target in self.targets.items():
            given = {**self._given(name), **self._place(name)}
            texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in given.items()}
            release = f"{self.wheels.version}-{_hash([self.wheels.files, target.python])}"
            environ = {variable(n): str(text) for n, text in texts.items()}
            found[name] = WantedHost(target, environ, release)
        return found

    def _given(self, name: str) -> dict[str, Any]:
        given = {**self._document.settings, **self._document.hosts[name].settings}
        return {name: value for name, value in given.items() if value is not None}

    def _place(self, name: str) -> dict[str, Any]:
        """Return the settings of a host's place among the others."""
        place = {"host_name": name, "bind": self._document.hosts[name].address}
        leaders = [each for each in self._document.hosts if "store" in self._given(each)]
        leaders = leaders or [self.leads]
        if name not in leaders:
            place["join"] = ",".join(map(self._gate, leaders))
        return place

    def _gate(self, name: str) -> str:
        given = {"advertise": self._document.hosts[name].address, **self._given(name)}
        return "{}:{}".format(given["advertise"], given.get("admin_port", DEFAULT_PORT))

    def _wrong_settings(self) -> Iterator[tuple[Place, str]]:
        first_at: dict[tuple[str, str], str] = {}
        for name, target in self.targets.items():
            first = first_at.setdefault((target.ssh, target.dir), name)
            if first != name:
                taken = f"is at {target.ssh} in {target.dir}, as {first!r} is"
                yield ("hosts", name), f"{taken}; name another machine, or another dir"
            try:
                read_settings({}, **self._given(name), **self._place(name))
            except InvalidRequestError as error:
                yield ("hosts", name), str(error).removeprefix("invalid settings: ")


class Wheels:
    """A folder with a release: the wheel of Greenroom, and all that are installed with it."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InvalidRequestError(f"wheels: there is no folder {folder}; {_MAKE}")
        self.folder = folder
        self.files: dict[str, str] = {}  # hash by file name
        versions: dict[str, set[str]] = {}
        for path in sorted(folder.iterdir()):
            if path.name.endswith((".tar.gz", ".zip")):
                raise InvalidRequestError(f"wheels: {path} is no wheel; {_MAKE}")
            if match := _WHEEL.fullmatch(path.name):
                versions.setdefault(match["name"].lower(), set()).add(match["version"])
                self.files[path.name] = sha256(path)
        for name, found in versions.items():
            if len(found) > 1:
                places = ", ".join(sorted(found))
                raise InvalidRequestError(f"wheels: {folder} has {name} in {places}; keep one")
        if "greenroom" not in versions:
            raise InvalidRequestError(f"wheels: no wheel of greenroom is in {folder}; {_MAKE}")
        self.requirements = [f"{name}=={version}" for name, (version,) in versions.items()]
        (self.version,) = versions["greenroom"]


_MAKE = "make them by `pip wheel --wheel-dir DIR 'greenroom[cluster]'`, with what your code imports"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
