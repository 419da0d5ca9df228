"""Where a host's system lives and listens: flags and environment, read in one function."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greenroom.actors.host.capacity import read_capacity
from greenroom.actors.runtime.state_dir import write_private
from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress
from greenroom.actors.transport.cluster_key import ClusterKeyError, ensure_key
from greenroom.actors.transport.network import TLS_FILES, TlsError, Way, tls_of
from greenroom.core.config import NO_LIMIT, HTTPOptions, validated
from greenroom.core.errors import InvalidRequestError, NotRunningError, StartError
from greenroom.core.validation import MAX_TAG_BYTES, wrong_with

# Where other hosts reach this one, and what makes them a cluster: flags, and what they need.

TLS = ("tls_cert", "tls_key", "tls_ca")
LEADS = "Greenroom Leads"  # the capability of hosts on which the controller may be
MAY_LEAD = "Greenroom May Lead"  # of those on which one may be that has its host's word
NETWORK_FILE = "network.json"


def read_binding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of HostSettings that this module is about, checked."""
    bind, join, leaders = (values.get(name) for name in ("bind", "join", "leaders"))
    if bind is not None:
        bind = _bindable(str(bind))
    if join is not None:
        for each in str(join).split(","):
            _check_join(each, bind)
    files = {name: values.get(name) for name in ("key_file", *TLS)}
    given = [name for name in TLS if files[name]]
    if given and len(given) < len(TLS):
        raise InvalidRequestError(
            f"{given[0]}={files[given[0]]!r}: {', '.join(TLS)} go together, or not at all"
        )
    paths = {name: Path(file).absolute() if file else None for name, file in files.items()}
    return {"bind": bind, "join": join, "leaders": leaders, **paths}


def _bindable(bind: str) -> str:
    try:
        address = ipaddress.IPv4Address(bind)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        raise InvalidRequestError(
            f"bind={bind!r}: expected one IPv4 address of this host, by which others reach it"
        )
    return bind


def _check_join(join: str, bind: str | None) -> None:
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequestError(f"join={join!r}: expected HOST:PORT of a system that runs")
    if bind is None or bind == LOOPBACK:
        raise InvalidRequestError(
            f"join={join!r}: other hosts must reach this one too; name its address with --bind"
        )


def check_others(binding: Mapping[str, Any], admin_port: int) -> None:
    """Raise InvalidRequestError where ``join`` or ``leaders`` cannot be of a host so bound."""
    leaders, bind, join = (binding[name] for name in ("leaders", "bind", "join"))
    if join is not None and f"{bind}:{admin_port}" in str(join).split(","):
        raise InvalidRequestError(
            f"join={join!r}: {bind}:{admin_port} is this host itself; name others, or leave --join "
            "out on the host that leads"
        )
    if leaders is None:
        return
    each = str(leaders).split(",")
    for address in each:
        host, _, port = address.rpartition(":")
        try:
            ipaddress.IPv4Address(host)
            is_right = 0 < int(port) < 65536
        except ValueError:
            is_right = False
        if not is_right:
            raise InvalidRequestError(
                f"leaders={leaders!r}: {address!r} is not IP:PORT; name each host that may lead by "
                "its --bind address and admin port, in order, with commas"
            )
    if len(each) < 2 or len(set(each)) < len(each):
        raise InvalidRequestError(
            f"leaders={leaders!r}: expected two different hosts or more; a single leader needs no "
            "--leaders"
        )
    if join is not None:
        raise InvalidRequestError(
            f"leaders={leaders!r} and join={join!r}: a host may lead, or joins those "
            "that do; give one of them"
        )
    if f"{bind}:{admin_port}" not in each:
        raise InvalidRequestError(
            f"leaders={leaders!r}: this host, {bind or 'without --bind'}:{admin_port}, is not "
            "among them; name it, or have it join with --join"
        )


def prepare(settings: HostSettings) -> None:
    """Make what the actor system needs of other hosts, before it starts; StartError if it cannot.

    The cluster key is made, or copied from ``key_file``, whether or not the host is bound: so it is
    there to be copied when one joins. Child processes get its path by environment.
    """
    if settings.join and settings.key_file is None and not settings.cluster_key.exists():
        raise StartError(
            f"cannot join {settings.join} without the cluster's key: copy cluster.key from the "
            "state dir of a host that runs, and name the copy with --key-file"
        )
    try:
        ensure_key(settings.cluster_key, settings.key_file)
        tls_of(settings.to_environ())
    except (ClusterKeyError, TlsError) as error:
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


def convention_of(settings: HostSettings) -> dict[str, str]:
    """Return Thespian's capability that makes a bound host join another, or lead."""
    if not is_bound(settings) or settings.leaders or len(settings.gates) > 1:
        return {}  # where leaders take turns, this host's own processes look for them (joining.py)
    # Once: the admin would look it up again and again, and wait for it.
    address = resolved_gates(settings)[0] if settings.join else settings.own_address
    return {"Convention Address.IPv4": address}


def is_bound(settings: HostSettings) -> bool:
    """Tell whether other hosts can reach this one."""
    return settings.bind is not None and settings.bind != LOOPBACK


def resolved_gates(settings: HostSettings) -> list[str]:
    """Return the ``gates`` of a host by address; StartError where a name has none."""
    found = []
    for gate in settings.gates:
        host, _, port = gate.rpartition(":")
        try:
            address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        except OSError as error:
            raise StartError(f"cannot join {gate}: {host}: {error.strerror}") from None
        found.append(ProcessAddress(str(address), int(port)).text)
    return found


def capabilities_of(settings: HostSettings) -> dict[str, Any]:
    """Return what this host's actor system says of itself."""
    return {
        "Admin Port": settings.admin_port,
        LEADS: settings.join is None and not settings.leaders,
        MAY_LEAD: bool(settings.leaders),
        **convention_of(settings),
    }


def host_id(settings: HostSettings) -> str:
    """Return what tells this host from another of its name; made at its first start."""
    path = settings.host_id_file
    if not path.exists():
        write_private(path, secrets.token_hex(16))
    return path.read_text(encoding="ascii").strip()


def remember(settings: HostSettings) -> None:
    """Leave for commands what they need to reach other hosts as this one does, if it does."""
    if not is_bound(settings):
        return
    known = {name: text for name, text in settings.to_environ().items() if name in TLS_FILES}
    write_private(settings.run_dir / NETWORK_FILE, json.dumps(known))


def way_to(settings: HostSettings) -> Way | None:
    """Return how a command or a script comes to the system it is to talk to.

    InvalidRequestError when that is another host's, and there is no key for it, or none that this
    user may look at.
    """
    key = settings.key_file or settings.cluster_key
    environ = {name: text for name, text in settings.to_environ().items() if name in TLS_FILES}
    with contextlib.suppress(OSError, ValueError):  # of a system that never ran, or is not bound
        known = (settings.run_dir / NETWORK_FILE).read_text(encoding="utf-8")
        environ = {**json.loads(known), **environ}
    try:
        if key.exists():
            environ["GREENROOM_KEY_FILE"] = str(key)
    except OSError as error:
        raise InvalidRequestError(
            f"the cluster key {key} cannot be looked at: {error.strerror}; run this as the "
            "system's user, or name a key of your own with --key-file"
        ) from None
    if not settings.remote_addresses:
        return Way((), environ)
    if "GREENROOM_KEY_FILE" not in environ:
        raise InvalidRequestError(
            f"address={settings.address!r}: a system of another host takes only who has the "
            f"cluster's key; name its file with --key-file or GREENROOM_KEY_FILE ({key} is not "
            "there)"
        )
    return Way(tuple(_resolved(settings.remote_addresses)), environ)


def _resolved(addresses: Iterable[str]) -> list[str]:
    """Return addresses by number, without names that there are not; NotRunningError for none."""
    found, trouble = [], []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            found.append(f"{socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]}:{port}")
        except OSError as error:
            trouble.append(f"address={address!r}: {host}: {error.strerror}")
    if not found:
        raise NotRunningError("; ".join(trouble))
    return found


DEFAULT_ADMIN_PORT = 1900
DEFAULT_LOG_MAX_BYTES = 64 * 1024 * 1024
DEFAULT_LOG_FILES = 4
TEXT, JSON = LOG_FORMATS = ("text", "json")
DEFAULT_SILENCE_TIMEOUT_S = 5.0
MIN_SILENCE_TIMEOUT_S = 2.0  # beats come once a second
LOCAL_NAMES = ("127.0.0.1", "localhost")

# Environment variable -> field of HostSettings, or "http.<field>" of HTTPOptions. The command line
# sets the same fields, so each flag has its variable.
VARIABLES = {
    "GREENROOM_STATE_DIR": "state_dir",
    "GREENROOM_ADMIN_PORT": "admin_port",
    "GREENROOM_ADDRESS": "address",
    "GREENROOM_BIND": "bind",
    "GREENROOM_JOIN": "join",
    "GREENROOM_LEADERS": "leaders",
    "GREENROOM_KEY_FILE": "key_file",
    "GREENROOM_HOST_NAME": "host_name",
    "GREENROOM_TLS_CERT": "tls_cert",
    "GREENROOM_TLS_KEY": "tls_key",
    "GREENROOM_TLS_CA": "tls_ca",
    "GREENROOM_HTTP_HOST": "http.host",
    "GREENROOM_HTTP_PORT": "http.port",
    "GREENROOM_HTTP_PAGES_HOST": "http.pages_host",
    "GREENROOM_HTTP_PAGES_PORT": "http.pages_port",
    "GREENROOM_HTTP_WORKERS": "http.workers",
    "GREENROOM_HTTP_ROOT_PATH": "http.root_path",
    "GREENROOM_HTTP_REQUEST_TIMEOUT_S": "http.request_timeout_s",
    "GREENROOM_HTTP_KEEP_ALIVE_TIMEOUT_S": "http.keep_alive_timeout_s",
    "GREENROOM_HTTP_HEADER_TIMEOUT_S": "http.header_timeout_s",
    "GREENROOM_HTTP_MAX_BODY_BYTES": "http.max_body_bytes",
    "GREENROOM_HTTP_BODY_TIMEOUT_S": "http.body_timeout_s",
    "GREENROOM_HTTP_SEND_TIMEOUT_S": "http.send_timeout_s",
    "GREENROOM_HTTP_MAX_WAITING_BODY_BYTES": "http.max_waiting_body_bytes",
    "GREENROOM_HTTP_MAX_WEBSOCKET_MESSAGE_BYTES": "http.max_websocket_message_bytes",
    "GREENROOM_HTTP_SSL_KEYFILE": "http.ssl_keyfile",
    "GREENROOM_HTTP_SSL_CERTFILE": "http.ssl_certfile",
    "GREENROOM_HTTP_MIDDLEWARES": "http.middlewares",
    "GREENROOM_HTTP_MIDDLEWARES_DIR": "http.middlewares_dir",
    "GREENROOM_HTTP_CORS": "http.cors",
    "GREENROOM_NUM_CPUS": "num_cpus",
    "GREENROOM_NUM_GPUS": "num_gpus",
    "GREENROOM_MEMORY": "memory",
    "GREENROOM_RESOURCES": "resources",
    "GREENROOM_SILENCE_TIMEOUT_S": "silence_timeout_s",
    "GREENROOM_LOG_FORMAT": "log_format",
    "GREENROOM_LOG_MAX_BYTES": "log_max_bytes",
    "GREENROOM_LOG_FILES": "log_files",
    # For tests only: the chance, 0 to 1, that the controller kills itself around a checkpoint.
    "GREENROOM_TEST_CRASH_AFTER_CHECKPOINT": "crash_after_checkpoint",
    "GREENROOM_TEST_CRASH_BEFORE_CHECKPOINT": "crash_before_checkpoint",
}
_HTTP_PATHS = ("ssl_keyfile", "ssl_certfile", "middlewares_dir")
# The state dir says which system is meant, and the key is copied from its file at the start; the
# others are for clients and tests.
_OF_NO_START = (
    "state_dir",
    "address",
    "key_file",
    "log_format",
    "crash_after_checkpoint",
    "crash_before_checkpoint",
)


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """One host's settings; every process of the host gets the same ones, by environment."""

    state_dir: Path
    admin_port: int = DEFAULT_ADMIN_PORT
    address: str | None = None  # HOST:PORT, or several with commas, to talk to; None is this host's
    http: HTTPOptions = field(default_factory=HTTPOptions)
    bind: str | None = None  # this host's address for other hosts; None when there are none
    join: str | None = None  # HOST:PORT, or several with commas, of a cluster to join
    leaders: str | None = None  # IP:PORT,IP:PORT in order, where several hosts may lead
    host_name: str = "localhost"  # by which status and placement know this host
    key_file: Path | None = None  # the cluster key, to be copied into the state dir
    tls_cert: Path | None = None  # PEM files, all three or none
    tls_key: Path | None = None
    tls_ca: Path | None = None
    num_cpus: float | None = None  # what replicas may take; None is what the host has
    num_gpus: float | None = None
    memory: float | None = None  # bytes
    resources: Mapping[str, float] = field(default_factory=dict)  # custom ones
    labels: Mapping[str, str] = field(default_factory=dict)
    log_format: str = TEXT  # of what `start --block` prints
    log_max_bytes: int = DEFAULT_LOG_MAX_BYTES  # then a log is rotated; 0: never
    log_files: int = DEFAULT_LOG_FILES  # of each log, besides the one that is written
    silence_timeout_s: float = DEFAULT_SILENCE_TIMEOUT_S  # 0: nothing is killed for it
    crash_after_checkpoint: float = 0.0
    crash_before_checkpoint: float = 0.0

    def __post_init__(self) -> None:
        # The host's processes leave the folder that a relative path is meant from.
        named = {name: getattr(self.http, name) for name in _HTTP_PATHS}
        whole = {name: os.path.abspath(path) for name, path in named.items() if path}
        if any(named[name] != path for name, path in whole.items()):
            object.__setattr__(self, "http", self.http.model_copy(update=whole))

    @property
    def own_dir(self) -> Path:
        """The folder of what is this host's alone: part of a state dir that leaders share."""
        own = self.state_dir / "hosts" / self.host_name
        # Path's is_dir raises where the folder may not be read, and whoever opens it tells better.
        is_there = os.path.isdir(own)
        return own if self.leaders or is_there else self.state_dir

    @property
    def logs_dir(self) -> Path:
        """The folder of all logs."""
        return self.own_dir / "logs"

    @property
    def run_dir(self) -> Path:
        """The folder of the records of running processes."""
        return self.own_dir / "run"

    @property
    def store_dir(self) -> Path:
        """The folder of the key-value store."""
        return self.state_dir / "store"

    @property
    def folders_dir(self) -> Path:
        """Where the folders that replicas work in are unpacked."""
        return self.state_dir / "folders"

    @property
    def status_file(self) -> Path:
        """The status snapshot, beside the store."""
        return self.own_dir / "status.json"

    @property
    def cluster_key(self) -> Path:
        """The file that makes hosts one cluster."""
        return self.state_dir / "cluster.key"

    @property
    def remote_addresses(self) -> tuple[str, ...]:
        """What ``address`` names, where that is not this host's system."""
        each = tuple(self.address.split(",")) if self.address else ()
        return () if any(map(_is_of_this_host, each)) else each

    @property
    def host_id_file(self) -> Path:
        """The file with what tells this host from another of its name."""
        return self.own_dir / "host.id"

    @property
    def leader_addresses(self) -> tuple[str, ...]:
        """IP:PORT of each host that may lead, in order; empty where only one may."""
        return tuple(self.leaders.split(",")) if self.leaders else ()

    @property
    def gates(self) -> tuple[str, ...]:
        """HOST:PORT of each other host that may know who leads; empty on the only one."""
        if self.leaders:
            return tuple(each for each in self.leader_addresses if each != self.own_address)
        return tuple(self.join.split(",")) if self.join else ()

    @property
    def own_address(self) -> str:
        """HOST:PORT of this host's actor system."""
        return f"{self.bind or LOCAL_NAMES[0]}:{self.admin_port}"

    def to_environ(self) -> dict[str, str]:
        """Return the variables that make :func:`read_settings` give these settings again."""
        values = {name: self._value(path) for name, path in VARIABLES.items()}
        return {name: str(value) for name, value in values.items() if value not in (None, "")}

    def _value(self, path: str) -> Any:
        if path == "resources":
            given = {**self.resources, **self.labels}
            return json.dumps(given, sort_keys=True) if given else None
        if path in {"http.middlewares", "http.cors"}:
            plain = self.http.model_dump()[path[5:]]
            return json.dumps(plain) if plain else None
        if path == "http.max_body_bytes":
            return NO_LIMIT if self.http.max_body_bytes is None else self.http.max_body_bytes
        if path == "http.middlewares_dir" and self.http.middlewares:
            return self.http.middlewares_dir or Path.cwd()  # the host's processes leave it
        return getattr(self.http, path[5:]) if path.startswith("http.") else getattr(self, path)


def read_settings(environ: Mapping[str, str] | None = None, /, **overrides: Any) -> HostSettings:
    """Read the settings from ``overrides`` first, then the environment, then the defaults.

    ``overrides`` are fields of HostSettings, or of HTTPOptions with the prefix ``http_``; None
    means not given. Raises InvalidRequestError naming each bad value and where it came from.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {
        path: environ[name] for name, path in VARIABLES.items() if environ.get(name)
    }
    for name, value in overrides.items():
        if value is not None:
            values[_field(name)] = value
    http = {path[5:]: value for path, value in values.items() if path.startswith("http.")}
    binding = read_binding(values)
    admin_port = _admin_port(values)
    if values.get("address") is None:  # else the port is of another host
        check_others(binding, admin_port)
    return HostSettings(
        state_dir=Path(values.get("state_dir") or _default_state_dir(environ)).absolute(),
        admin_port=admin_port,
        address=values.get("address"),
        host_name=_host_name(values),
        http=validated(HTTPOptions, http),
        **binding,
        **read_capacity(values),
        silence_timeout_s=_silence_timeout_s(values),
        log_format=_log_format(values),
        log_max_bytes=_count("log_max_bytes", values, DEFAULT_LOG_MAX_BYTES),
        log_files=_count("log_files", values, DEFAULT_LOG_FILES),
        crash_after_checkpoint=_number("crash_after_checkpoint", values, 0.0, float),
        crash_before_checkpoint=_number("crash_before_checkpoint", values, 0.0, float),
    )


def given_fields(environ: Mapping[str, str] | None = None, /, **overrides: Any) -> frozenset[str]:
    """Return the fields that are given to :func:`read_settings`, as VARIABLES names them."""
    environ = os.environ if environ is None else environ
    given = {path for name, path in VARIABLES.items() if environ.get(name)}
    return frozenset(
        given | {_field(name) for name, value in overrides.items() if value is not None}
    )


def differences(
    settings: HostSettings, running: Mapping[str, str], fields: Iterable[str]
) -> list[str]:
    """Say in which of ``fields`` the settings differ from those of a system that runs.

    ``running`` is what :meth:`HostSettings.to_environ` returned for that one.
    """
    wanted = settings.to_environ()
    return [
        f"{path.replace('.', '_')} is {running.get(name) or 'not set'}, not {wanted.get(name)}"
        for name, path in VARIABLES.items()
        if path in fields and path not in _OF_NO_START and running.get(name) != wanted.get(name)
    ]


def _field(flag: str) -> str:
    return flag.replace("http_", "http.", 1) if flag.startswith("http_") else flag


def _default_state_dir(environ: Mapping[str, str]) -> Path:
    base = (
        environ.get("XDG_STATE_HOME")
        or Path(environ.get("HOME", "~")).expanduser() / ".local/state"
    )
    return Path(base) / "greenroom"


def _admin_port(values: Mapping[str, Any]) -> int:
    """Return the port of ``address`` where one is given, else ``admin_port``."""
    address = values.get("address")
    if address is None:
        return int(_number("admin_port", values, DEFAULT_ADMIN_PORT, int))
    each = str(address).split(",")
    for one in each:
        host, _, port = one.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidRequestError(
                f"address={address!r}: expected HOST:PORT, or several with commas"
            )
        if len(each) > 1 and _is_of_this_host(one):
            raise InvalidRequestError(
                f"address={address!r}: {host} is this host's alone; name hosts of one cluster by "
                "the addresses that all reach"
            )
    return int(each[0].rpartition(":")[2])


def _is_of_this_host(address: str) -> bool:
    return address.rpartition(":")[0] in LOCAL_NAMES


def _host_name(values: Mapping[str, Any]) -> str:
    name = str(values.get("host_name") or socket.gethostname() or "localhost")
    wrong = wrong_with(name, MAX_TAG_BYTES)
    if wrong is None and ("/" in name or name in (".", "..")):  # leaders have folders of that name
        wrong = "expected what can be a folder's name"
    if wrong:
        raise InvalidRequestError(f"host_name={name!r}: {wrong}")
    return name


def _log_format(values: Mapping[str, Any]) -> str:
    value = str(values.get("log_format", TEXT))
    if value not in LOG_FORMATS:
        raise InvalidRequestError(f"log_format={value!r}: expected one of {', '.join(LOG_FORMATS)}")
    return value


def _count(name: str, values: Mapping[str, Any], default: int) -> int:
    value = int(_number(name, values, default, int))
    if value < 0:
        raise InvalidRequestError(f"{name}={value}: expected 0 or more")
    return value


def _silence_timeout_s(values: Mapping[str, Any]) -> float:
    name = "silence_timeout_s"
    value = float(_number(name, values, DEFAULT_SILENCE_TIMEOUT_S, float))
    if value != 0 and not MIN_SILENCE_TIMEOUT_S <= value < float("inf"):
        raise InvalidRequestError(
            f"{name}={value:g}: expected {MIN_SILENCE_TIMEOUT_S:g} seconds or more, or 0 for never"
        )
    return value


def _number(name: str, values: Mapping[str, Any], default: Any, kind: type[Any]) -> Any:
    value = values.get(name, default)
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"{name}={value!r}: expected a number") from None
