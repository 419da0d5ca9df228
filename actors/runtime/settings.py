"""The settings of a host: one model gives fields, defaults, environment variables, flags and docs.

Theory of operation. A setting ``x`` of :class:`HostSettings` is the flag ``--x`` and the variable
``GREENROOM_X``; one of HTTPOptions is ``--http-x`` and ``GREENROOM_HTTP_X``. The command line makes
its flags, and docs/commands.md its table, from the descriptions here. A host's processes all get
the settings that it was started with: :meth:`HostSettings.to_environ` puts them into their
environment, and :func:`read_settings` reads them there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from greenroom.actors.runtime.state_dir import write_private
from greenroom.actors.transport.addresses import LOOPBACK, Access
from greenroom.actors.transport.cluster_key import ClusterKeyError, ensure_key
from greenroom.core.config import (
    MAX_GRPC_MESSAGE_BYTES,
    MAX_GRPC_RPCS,
    GrpcOptions,
    HTTPOptions,
    ServicerFunction,
)
from greenroom.core.devices import VARIABLES
from greenroom.core.errors import InvalidRequestError, NotRunningError, StartError
from greenroom.core.lifecycle.placement import STORE_LABEL
from greenroom.core.validation import MAX_TAG_BYTES, Settings, describe, nearest, wrong_with
from greenroom.persistence.locations import is_database, location_at

PREFIX = "GREENROOM_"
TEXT, JSON = "text", "json"
DEFAULT_SILENCE_TIMEOUT_S = 5.0
MIN_SILENCE_TIMEOUT_S = 2.0  # beats come once a second
LOCAL_NAMES = ("127.0.0.1", "localhost")
BUILT_IN_RESOURCES = ("num_cpus", "num_gpus", "memory")
LEADS = "Greenroom Leads"  # the capability of hosts on which the controller may be
MAY_LEAD = "Greenroom May Lead"  # of those on which one may be that has its host's word
_HTTP = "http_"


# --- Parsers of fields ----------------------------------------------------------------------------


def _default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(base) / "greenroom"


def _with_absolute_paths(options: HTTPOptions) -> HTTPOptions:
    # The host's processes leave the folder that a relative path is meant from.
    names = ("ssl_keyfile", "ssl_certfile", "middlewares_dir")
    paths = {name: getattr(options, name) for name in names}
    if options.middlewares:
        paths["middlewares_dir"] = paths["middlewares_dir"] or "."
    changes = {name: os.path.abspath(path) for name, path in paths.items() if path}
    return options.model_copy(update=changes)


def _read_functions(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else tuple(value.split(","))


def _check_host_and_port(text: str, wanted: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not {wanted}")


def _is_of_this_host(address: str) -> bool:
    return address.rpartition(":")[0] in LOCAL_NAMES


def _check_addresses(addresses: str) -> str:
    each = addresses.split(",") if addresses else ()
    for one in each:
        _check_host_and_port(one, "HOST:PORT, or several with commas")
        if len(each) > 1 and _is_of_this_host(one):
            raise ValueError(
                f"{one} is on this host alone; name the hosts of one cluster by addresses that "
                "all of them reach"
            )
    return addresses


def _check_systems(join: str) -> str:
    for each in join.split(",") if join else ():
        _check_host_and_port(each, "HOST:PORT of a system that runs")
    return join


def _check_own_address(given: str) -> str:
    try:
        address = ipaddress.IPv4Address(given)
    except ValueError:
        address = ipaddress.IPv4Address(0)
    if address.is_unspecified or address.is_multicast:
        raise ValueError("expected one IPv4 address of this host, which others can reach")
    return given


def _check_host_name(name: str) -> str:
    wrong = wrong_with(name, MAX_TAG_BYTES)
    if wrong is None and ("/" in name or name in (".", "..")):  # its notes in a store are files
        wrong = "expected a name that a folder can have"
    if wrong:
        raise ValueError(wrong)
    return name


def _read_resources(value: Any) -> dict[str, float | str]:
    given = _read_pairs(value)
    if given is None or not given.keys().isdisjoint(BUILT_IN_RESOURCES):
        raise ValueError(
            "expected names, each once, with amounts or labels, such as disk=2,zone=a, or a "
            "JSON object of them, such as '{\"disk\": 2}'; "
            f"{', '.join(BUILT_IN_RESOURCES)} have settings of their own"
        )
    read = {name: _amount_or_label(each) for name, each in given.items()}
    for name, each in read.items():
        if not isinstance(each, str) and not 0 <= each < float("inf"):
            raise ValueError(f"{name}={given[name]!r}: expected a number, 0 or more")
    return read


def _read_pairs(value: Any) -> dict[str, Any] | None:
    """Read name=value pairs, or JSON; None where it is neither."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        given = {name.strip(): text.strip() for name, _, text in pairs}
        # A name that comes twice is a mistake: which of the two was meant is not known.
        is_whole = all(given) and all(given.values()) and len(given) == len(pairs)
        return given if is_whole else None
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    return dict(value) if isinstance(value, Mapping) else None


def _amount_or_label(value: Any) -> float | str:
    try:
        return -1.0 if isinstance(value, bool) else float(value)
    except ValueError:
        return str(value)
    except TypeError:
        return -1.0


def _check_silence(value: float) -> float:
    if value and value < MIN_SILENCE_TIMEOUT_S:
        raise ValueError(f"expected {MIN_SILENCE_TIMEOUT_S:g} seconds or more, or 0 for never")
    return value


AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
AbsoluteName = Annotated[str, AfterValidator(os.path.abspath)]
OwnAddress = Annotated[str, AfterValidator(_check_own_address)]


# --- The settings ---------------------------------------------------------------------------------


class HostSettings(Settings):
    """One host's settings. Made directly it reads no environment: see :func:`read_settings`."""

    model_config = ConfigDict(validate_default=True)

    state_dir: AbsolutePath = Field(
        default_factory=_default_state_dir,
        description="Folder of state and logs [$XDG_STATE_HOME/greenroom or "
        "~/.local/state/greenroom].",
    )
    admin_port: int = Field(
        default=1900, gt=0, lt=65536, description="Port of this host's actor system."
    )
    address: Annotated[str, AfterValidator(_check_addresses)] | None = Field(
        default=None,
        description="HOST:PORT of the system that commands and clients talk to; several hosts of "
        "one cluster with commas [this host's].",
    )
    key_file: AbsolutePath | None = Field(
        default=None,
        description="The cluster file, made by `greenroom keygen` or copied from a host that runs. "
        "A start keeps it in the state dir.",
    )
    http: Annotated[HTTPOptions, AfterValidator(_with_absolute_paths)] = HTTPOptions()
    grpc_port: int | None = Field(
        default=None, gt=0, lt=65536, description="Port for gRPC, on HTTP's address [no gRPC]."
    )
    grpc_servicer_functions: Annotated[
        tuple[ServicerFunction, ...], BeforeValidator(_read_functions)
    ] = Field(
        default=(),
        description="Functions that add servicers, as module.add_XServicer_to_server with commas.",
    )
    grpc_dir: AbsoluteName | None = Field(
        default=None,
        description="Folder of servicers that are not installed [where it is started].",
    )
    grpc_request_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds that an RPC may take [no limit]."
    )
    grpc_max_receive_message_length: int = Field(
        default=MAX_GRPC_MESSAGE_BYTES,
        ge=1,
        le=2**31 - 1,
        description="Bytes of a client's message; larger ones are RESOURCE_EXHAUSTED.",
    )
    grpc_maximum_concurrent_rpcs: int = Field(
        default=MAX_GRPC_RPCS, ge=1, description="RPCs at a time; more are RESOURCE_EXHAUSTED."
    )
    grpc_reflection: bool = Field(
        default=True, description="Tell clients the services and their messages."
    )
    grpc_ssl_ca_certs: AbsoluteName | None = Field(
        default=None,
        description="PEM: gRPC clients need a certificate of one of these authorities [none].",
    )
    bind: OwnAddress | None = Field(
        default=None, description="This host's IPv4 address for other hosts [they cannot reach it]."
    )
    advertise: OwnAddress | None = Field(
        default=None,
        description="The IPv4 address by which other hosts reach this one, where it is translated "
        "[that of --bind].",
    )
    join: Annotated[str, AfterValidator(_check_systems)] | None = Field(
        default=None,
        description="HOST:PORT of the cluster's leader, or of all leaders with commas, for a host "
        "that joins; needs --bind.",
    )
    store: str | None = Field(
        default=None,
        repr=False,  # it may have a password
        description="Where hosts that may lead keep the cluster's state: postgresql://USER@HOST/"
        "DATABASE, or the absolute path of a folder that they share [the state dir].",
    )
    host_name: Annotated[str, AfterValidator(_check_host_name)] = Field(
        default_factory=lambda: socket.gethostname() or "localhost",
        description="This host's name in the cluster [the machine's].",
    )
    num_cpus: float | None = Field(
        default=None, ge=0, description="CPUs that replicas may take together [the host's]."
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that they may take, numbered from 0 [those of NVIDIA or AMD, within "
        "CUDA_, HIP_ and ROCR_VISIBLE_DEVICES].",
    )
    memory: float | None = Field(
        default=None, ge=0, description="Bytes of memory that they may take [the host's]."
    )
    resources: Annotated[Mapping[str, float | str], BeforeValidator(_read_resources)] = Field(
        default_factory=dict,
        description="Resources and labels of your own: disk=2,zone=a, or JSON. What is not a "
        "number is a label.",
    )
    no_replicas: bool = Field(
        default=False, description="Place no replicas here: this host only takes HTTP."
    )
    silence_timeout_s: Annotated[float, AfterValidator(_check_silence)] = Field(
        default=DEFAULT_SILENCE_TIMEOUT_S,
        description="After how many seconds a process that stands still is killed and replaced; 2 "
        "or more, or 0 for never.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="How `start --block` prints events: text, or json for an object per line.",
    )
    log_max_bytes: int = Field(
        default=64 * 1024 * 1024, ge=0, description="Size at which a log is rotated; 0 for never."
    )
    log_files: int = Field(
        default=4, ge=0, description="How many rotated files of each log to keep."
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_from_others(cls, values: dict[str, Any]) -> dict[str, Any]:
        port = str(values.get("address") or "").partition(",")[0].rpartition(":")[2]
        if port.isdecimal():
            values = {**values, "admin_port": port}
        if values.get("grpc_servicer_functions"):
            # The host's processes leave the folder that they are started in.
            values = {"grpc_dir": "."} | values
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.grpc_servicer_functions and self.grpc_port is None:
            raise ValueError("grpc_servicer_functions: grpc_port must be given, too")
        if self.grpc_ssl_ca_certs is not None and self.http.ssl_certfile is None:
            raise ValueError("grpc_ssl_ca_certs: HTTP must have a certificate, which gRPC has too")
        for name, amount in {"num_gpus": self.num_gpus or 0.0, **self.custom_resources}.items():
            if name in VARIABLES and not amount.is_integer():
                raise ValueError(f"{name}={amount!r}: must be a whole number of devices")
        if self.no_replicas and (self.num_cpus or self.num_gpus or self.memory):
            raise ValueError(
                "no_replicas=True: a host without replicas has no num_cpus, num_gpus or memory for "
                "them; leave one or the other out"
            )
        if self.address is None:  # else the port is another host's
            _check_place_in_cluster(self)
        return self

    def with_options(
        self, http: HTTPOptions | None = None, grpc: GrpcOptions | None = None
    ) -> tuple[HostSettings, list[str]]:
        """Return a copy with the options that are given, and the names of these settings.

        gRPC's servicers are looked for in the current folder.
        """
        changes: dict[str, Any] = {}
        names: list[str] = []
        if http is not None:
            given = {name: value for name, value in http if name in http.model_fields_set}
            changes["http"] = _with_absolute_paths(self.http.model_copy(update=given))
            names += [f"{_HTTP}{name}" for name in given]
        if grpc is not None:
            changes |= {_grpc(name): value for name, value in grpc}
            if grpc.ssl_ca_certs is not None:
                changes["grpc_ssl_ca_certs"] = os.path.abspath(grpc.ssl_ca_certs)
            has_servicers = bool(grpc.grpc_servicer_functions)
            changes["grpc_port"] = grpc.port if has_servicers else None
            changes["grpc_dir"] = os.getcwd() if has_servicers else None
            if has_servicers:
                names += [_grpc(name) for name, _ in grpc if name in grpc.model_fields_set]
        return self.model_copy(update=changes), names

    @property
    def custom_resources(self) -> dict[str, float]:
        """The amounts among ``resources``."""
        return {name: x for name, x in self.resources.items() if not isinstance(x, str)}

    @property
    def labels(self) -> dict[str, str]:
        """The labels among ``resources``, and whether the cluster's store is here."""
        labels = {name: x for name, x in self.resources.items() if isinstance(x, str)}
        return labels if self.join else {**labels, STORE_LABEL: "yes"}

    @property
    def logs_dir(self) -> Path:
        """The folder of all logs."""
        return self.state_dir / "logs"

    @property
    def run_dir(self) -> Path:
        """The folder of the records of running processes."""
        return self.state_dir / "run"

    @property
    def store_dir(self) -> Path:
        """The folder of the key-value store, where that is not in a database."""
        return (self.shared_dir or self.state_dir) / "store"

    @property
    def shared_dir(self) -> Path | None:
        """The folder that this host's ``store`` names; None for a database, and without one."""
        return Path(self.store) if self.store and not is_database(self.store) else None

    @property
    def store_name(self) -> str | Path:
        """The name of the key-value store, for location_at."""
        return self.store if self.store and is_database(self.store) else self.store_dir

    @property
    def may_lead(self) -> bool:
        """Whether this host is one of several that may lead."""
        return self.store is not None

    @property
    def folders_dir(self) -> Path:
        """Where the folders that replicas work in are unpacked."""
        return self.state_dir / "folders"

    @property
    def environments_dir(self) -> Path:
        """Where the virtual environments of this host's replicas are."""
        return self.state_dir / "environments"

    @property
    def status_file(self) -> Path:
        """The status snapshot, beside the store."""
        return self.state_dir / "status.json"

    @property
    def drain_file(self) -> Path:
        """What the controller sent last of the time that a stop takes."""
        return self.run_dir / "drain_s"

    @property
    def cluster_key(self) -> Path:
        """The file that makes hosts one cluster."""
        return self.state_dir / "cluster.key"

    @property
    def host_id_file(self) -> Path:
        """The file with the id that distinguishes this host from another of its name."""
        return self.state_dir / "host.id"

    @property
    def known_store_file(self) -> Path:
        """The file that names the shared store in which this host has seen a state."""
        return self.state_dir / "store.known"

    @property
    def remote_addresses(self) -> tuple[str, ...]:
        """The hosts that ``address`` names; empty where that is this host's system."""
        each = tuple(self.address.split(",")) if self.address else ()
        return () if any(map(_is_of_this_host, each)) else each

    @property
    def gates(self) -> tuple[str, ...]:
        """HOST:PORT of each host that it joins by."""
        return tuple(self.join.split(",")) if self.join else ()

    @property
    def own_address(self) -> str:
        """HOST:PORT of this host's actor system."""
        return f"{self.advertise or self.bind or LOCAL_NAMES[0]}:{self.admin_port}"

    def to_environ(self) -> dict[str, str]:
        """Return the variables that make :func:`read_settings` give these settings again."""
        plain = self.model_dump(mode="json")
        plain |= {f"{_HTTP}{name}": value for name, value in plain.pop("http").items()}
        return {
            variable(name): value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for name, value in plain.items()
            if value not in (None, "", [], {})
        }


def _check_place_in_cluster(settings: HostSettings) -> None:
    """Raise ValueError where ``join`` or ``store`` does not fit a host that is bound so."""
    join, own = settings.join, settings.own_address
    if settings.store is not None:
        _check_store(settings)
    if settings.advertise is not None and not is_bound(settings):
        raise ValueError(
            f"advertise={settings.advertise!r}: name the address of this host behind it with --bind"
        )
    if join is not None and not is_bound(settings):
        raise ValueError(
            f"join={join!r}: other hosts must reach this one too; name its address with --bind"
        )
    if join is not None and own in join.split(","):
        raise ValueError(
            f"join={join!r}: {own} is this host itself; name others, or leave --join out on the "
            "host that leads"
        )


def _check_store(settings: HostSettings) -> None:
    """Raise ValueError, without a password, where ``store`` does not fit."""
    if settings.shared_dir is not None and not settings.shared_dir.is_absolute():
        raise ValueError(
            f"store={settings.store!r}: must be the absolute path of a folder, or "
            "postgresql://USER@HOST/DATABASE"
        )
    try:
        shown = f"store={location_at(settings.store_name)}"
    except ValueError as error:
        raise ValueError(f"store={error}") from None
    if settings.join:
        raise ValueError(
            f"{shown}: hosts find each other there; leave out --join, or --store on a host that is "
            "never to lead"
        )


def variable(name: str) -> str:
    """Return the environment variable of a field, as :data:`FIELDS` names it."""
    return PREFIX + name.upper()


# Every setting by the name of its flag and variable: those of HTTPOptions begin with ``http_``.
FIELDS: Mapping[str, FieldInfo] = {
    **{name: field for name, field in HostSettings.model_fields.items() if name != "http"},
    **{f"{_HTTP}{name}": field for name, field in HTTPOptions.model_fields.items()},
}


def described(field: FieldInfo) -> str:
    """Return what a setting is, and its default; where the model has none, the text says it."""
    each = field.default if isinstance(field.default, tuple) else (field.default,)
    texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in each]
    has_none = field.is_required() or field.default_factory is not None or field.default is False
    is_shown = not has_none and field.default not in (None, "", (), {})
    default = f" [{','.join(texts)}]" if is_shown else ""
    default = default.lower() if field.default is True else default
    return f"{str(field.description).removesuffix('.')}{default}."


def read_settings(environ: Mapping[str, str] | None = None, /, **flags: Any) -> HostSettings:
    """Read the settings from ``flags`` first, then the environment, then the defaults.

    Flags are named as in :data:`FIELDS`; None means not given. Raises InvalidRequestError naming
    each bad value.
    """
    environ = os.environ if environ is None else environ
    _check_names(environ)
    values = _given(environ, flags)
    http = {name: values.pop(name) for name in list(values) if name.startswith(_HTTP)}
    values["http"] = {name.removeprefix(_HTTP): value for name, value in http.items()}
    try:
        return HostSettings.model_validate(values)
    except ValidationError as error:
        raise InvalidRequestError(describe("settings", error)) from None


def given_fields(environ: Mapping[str, str] | None = None, /, **flags: Any) -> frozenset[str]:
    """Return the names of the settings that are given to :func:`read_settings`."""
    return frozenset(_given(os.environ if environ is None else environ, flags))


def _given(environ: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, by flag or else by a variable that is not empty."""
    variables = {name.upper(): value for name, value in environ.items() if value}
    by_variable = {n: variables[variable(n)] for n in FIELDS if variable(n) in variables}
    return by_variable | {name: value for name, value in flags.items() if value is not None}


def _check_names(environ: Mapping[str, str]) -> None:
    """Refuse variables that are of no setting, if they are HTTP's or nearly those of one.

    Others may be ours, or mean something to the user's code.
    """
    problems = []
    for name, value in environ.items():
        field = name.upper().removeprefix(PREFIX).lower()
        if value and field != name.lower() and field not in FIELDS:
            meant = nearest(field, FIELDS)
            if meant or f"{field}_".startswith(_HTTP):
                hint = f"; did you mean {variable(meant)}?" if meant else ""
                problems.append(f"{name}: no such setting{hint}")
    if problems:
        raise InvalidRequestError("; ".join(problems))


# The state dir says which system is meant, the key is copied at the start, and the others are
# settings of the command, not of the system.
_OF_NO_SYSTEM = ("state_dir", "address", "key_file", "log_format")


def _grpc(name: str) -> str:
    return name if name.startswith("grpc_") else f"grpc_{name}"


def differences(
    settings: HostSettings, running: Mapping[str, str], fields: Iterable[str]
) -> list[str]:
    """Say in which of ``fields`` the settings differ from those of a system that runs.

    ``running`` is what :meth:`HostSettings.to_environ` returned for that one.
    """
    wanted, running = settings.to_environ(), dict(running)
    for environ in (wanted, running):
        if store := environ.get(variable("store")):
            environ[variable("store")] = str(location_at(store))  # without a password
    names = [name for name in FIELDS if name in fields and name not in _OF_NO_SYSTEM]
    values = {name: [e.get(variable(name), "not set") for e in (running, wanted)] for name in names}
    return [f"{n} is {there}, not {here}" for n, (there, here) in values.items() if there != here]


# --- Preparing the actor system -------------------------------------------------------------------


def prepare(settings: HostSettings) -> None:
    """Make what the actor system needs of other hosts, before it starts; StartError if it cannot.

    A bound host needs the cluster file: it is made, or copied from ``key_file``. Child processes
    get its path by environment.
    """
    given = settings.key_file
    if given == settings.cluster_key:  # by the variable below, where this process starts over
        given = None
    if settings.join and given is None and not settings.cluster_key.exists():
        raise StartError(
            f"cannot join {settings.join} without the cluster file: copy cluster.key from the "
            "state dir of a host that runs, and name the copy with --key-file"
        )
    if settings.store and not is_bound(settings):
        raise StartError(
            f"cannot share {location_at(settings.store)}: the hosts that do must reach each other; "
            "name this one's address with --bind"
        )
    if settings.store and given is None and not settings.cluster_key.exists():
        raise StartError(
            f"cannot share {location_at(settings.store)} without the cluster file: make one with "
            "`greenroom keygen FILE`, and start each host with --key-file FILE"
        )
    try:
        if is_bound(settings) or given is not None:
            ensure_key(settings.cluster_key, given)
    except ClusterKeyError as error:
        raise StartError(str(error)) from None
    os.environ["GREENROOM_KEY_FILE"] = str(settings.cluster_key)
    if settings.bind is not None:
        _try_address(settings.bind)


def _try_address(bind: str) -> None:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind((bind, 0))
        except OSError as error:
            raise StartError(
                f"cannot listen on {bind}: {error.strerror}; --bind must be an address of this host"
            ) from None


def is_bound(settings: HostSettings) -> bool:
    """Return whether other hosts can reach this one."""
    return settings.bind is not None and settings.bind != LOOPBACK


def resolved_gates(settings: HostSettings) -> list[str]:
    """Return the ``gates`` of a host by address; StartError where a name has none."""
    found, trouble = _by_number(settings.gates)
    for gate, reason in trouble:
        raise StartError(f"cannot join {gate}: {reason}")
    return found


def _by_number(addresses: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the IPv4 addresses of HOST:PORTs, and those whose name has none, with the reason."""
    found, trouble = [], []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            found.append(f"{socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]}:{port}")
        except OSError as error:
            trouble.append((address, f"{host}: {error.strerror}"))
    return found, trouble


def capabilities_of(settings: HostSettings) -> dict[str, Any]:
    """Return what this host's actor system says of itself."""
    return {
        "Admin Port": settings.admin_port,
        LEADS: settings.join is None and not settings.may_lead,
        MAY_LEAD: settings.may_lead,
    }


def host_id(settings: HostSettings) -> str:
    """Return what tells this host from another of its name; made at its first start."""
    path = settings.host_id_file
    if not path.exists():
        write_private(path, secrets.token_hex(16))
    return path.read_text(encoding="ascii").strip()


def access_to(settings: HostSettings) -> Access | None:
    """Return how a command or a script comes to the system it is to talk to.

    InvalidRequestError when that is another host's, and there is no key for it, or none that this
    user may look at.
    """
    key = settings.key_file or settings.cluster_key
    environ: dict[str, str] = {}
    try:
        if key.exists():
            environ["GREENROOM_KEY_FILE"] = str(key)
    except OSError as error:
        raise InvalidRequestError(
            f"the cluster file {key} cannot be looked at: {error.strerror}; run this as the "
            "system's user, or name a copy of your own with --key-file"
        ) from None
    if not settings.remote_addresses:
        return Access((), environ)
    if "GREENROOM_KEY_FILE" not in environ:
        raise InvalidRequestError(
            f"address={settings.address!r}: a system of another host wants the "
            f"cluster file; name a copy with --key-file or GREENROOM_KEY_FILE ({key} is not "
            "there)"
        )
    found, trouble = _by_number(settings.remote_addresses)
    if not found:
        problems = (f"address={address!r}: {reason}" for address, reason in trouble)
        raise NotRunningError("; ".join(problems))
    return Access(tuple(found), environ)
