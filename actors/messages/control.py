"""The messages of the controller with its proxies, replicas and hosts; see :mod:`.queries`.

If several hosts may lead, a controller's orders carry its ``epoch``. A process that knows a later
epoch does not obey them, but answers with Superseded. Epoch 0 is that of the only leader.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from greenroom.actors.messages.queries import Address, LargeBytes, Message, Process, message
from greenroom.core.cluster.host_report import HostReport
from greenroom.core.effects import CheckReplica, ReconfigureReplica, StopReplica  # noqa: F401  # they travel under this module's name
from greenroom.core.lifecycle.replicas import Report

# --- Long poll: proxy -> controller -----------------------------------------------------------


@message
class Listen(Message):
    """Proxy to controller: up to which id it holds all; answered by Changed once there is more.

    Repeated every two seconds, which is also how the controller knows that the proxy lives.
    """

    listener: Process
    host: str
    seen: int
    store: str = ""  # whose tables these are: see Changed
    at: str = ""  # the address of its host, which tells two of one name apart


@message
class Changed(Message):
    """Controller to proxy: newer snapshots by key (None: deleted), with their snapshot ids.

    ``upto`` is what the proxy has seen once it holds them. What is not in a ``complete`` one does
    not exist. A repeat, or one that a newer one has overtaken, is harmless. ``store`` is the id of
    the controller's store, so that another one in its place is noticed.
    """

    controller: Process
    snapshots: dict[str, tuple[int, Any]]
    upto: int
    complete: bool
    epoch: int = 0
    store: str = ""


@message
class MeetController(Message):
    """Host process to proxy: the controller lives here (again). Repeats are safe.

    ``by`` is the host process. What one of before said may come after what its successor says.
    None where the proxy has found the controller itself.
    """

    controller: Address
    process: Process
    by: Process | None
    epoch: int = 0


@message
class ReplicaLost(Message):
    """Proxy to controller: the replica's process is gone."""

    replica: str
    incarnation: str


@message
class ReplicaEjected(Message):
    """Proxy to controller: a replica fails where others do not, so it gets no queries for a while.

    ``times`` is how often in a row; 0 when the proxy sends it queries again.
    """

    proxy: Process
    replica: str
    times: int


@message
class LoadReported(Message):
    """Proxy to controller: backend -> (queued, ongoing) of its router; repeats are safe.

    It stands for all that the proxy has: a backend that is not named has nothing there, and a later
    report replaces the earlier one. Sent every half second while there are queries, at once when
    one waits at a backend without replicas, and once more, empty, when the last has ended; also
    once to each controller that the proxy meets.
    """

    proxy: Process
    load: dict[str, tuple[int, int]]


@message
class TrafficReported(Message):
    """Proxy to controller: (endpoint, backend) -> core.series.PlainTraffic since the last report.

    Sent every second while there are queries; one that is lost is missing in the time series.
    """

    proxy: Process
    traffic: dict[tuple[str, str], tuple[int, int, int, int, int, dict[int, int]]]


@message
class TalliesReported(Message):
    """Proxy to controller: what became of the queries of endpoints with a rollout; may repeat.

    ``tallies`` is endpoint -> (the step's name, backend -> core.tallies.PlainTally): all that this
    proxy has counted in that step. Sent every second while there is a rollout.
    """

    proxy: Process
    tallies: dict[str, tuple[str, dict[str, tuple[int, int, int, dict[int, int]]]]]


# --- Replica lifecycle: controller -> replica ---------------------------------------------------


@message
class StartReplica(Message):
    """Controller to replica: become this one. Repeats are safe; answered by ReplicaReported."""

    replica: str
    backend: str
    deployment: str
    application: str
    version: str | None
    code: bytes  # cloudpickle of (function or class, args, kwargs)
    code_hash: str
    config: dict[str, Any]
    config_id: int  # grows with each change of the config
    runtime_env: dict[str, Any] = field(default_factory=dict)  # of core.config.RuntimeEnv
    devices: dict[str, tuple[int, ...]] = field(default_factory=dict)  # see core.devices
    rank: tuple[int, int, int, int] | None = None  # see core.lifecycle.replicas.Rank
    epoch: int = 0
    num_cpus: float = 0.0  # that it takes of its host


@message
class FetchFolder(Message):
    """Replica to controller: send me this zip; answered by FolderFetched. Repeats are safe."""

    replica: str
    digest: str


@message
class FolderFetched(Message):
    """Controller to replica: the zip of that sha256, or why there is none; may repeat."""

    digest: str
    content: LargeBytes | None
    error: str = ""


@message
class ReplicaReported(Report, Message):
    """Replica to controller: its state, after any of the above."""


@message
class ComparisonsReported(Message):
    """Replica of a shadow to controller: all that its comparisons have found; may repeat.

    By endpoint, shadow and the id of the settings, as core.differences has it.
    """

    process: Process
    found: dict[tuple[str, str, str], dict[str, Any]]


@message
class MeetProxy(Message):
    """Proxy to replica: it will send queries. Repeats are safe.

    Handles made in the replica send theirs to a proxy that ``is_near``, of the same host.
    """

    proxy: Address
    process: Process
    is_near: bool


# --- Identity and hosts -------------------------------------------------------------------------


@message
class Identify(Message):
    """Anyone to any of our actors: who are you; answered by IdentifyReply."""

    request_id: str


@message
class IdentifyReply(Message):
    """An actor's process, and the title it shows in process lists.

    ``epoch`` is that of a controller which another host's may follow, else 0.
    """

    request_id: str
    process: Process
    title: str
    epoch: int = 0


@message
class StopHost(Message):
    """Controller to host process: stop this host's system; ``forget`` deletes its state too."""

    forget: bool
    epoch: int = 0


@message
class HostReported(HostReport, Message):
    """Host process to controller: what this host is, and what runs there. Repeats are safe.

    The first one of a host joins it. Answered with HostAnswered.
    """


@message
class HostAnswered(Message):
    """Controller to host process: it is in the cluster, or cannot be for this reason."""

    refusal: str = ""
    epoch: int = 0
    hosts: tuple[str, ...] = ()  # addresses of all hosts for one that may lead, else of those
    drain_s: float = 0.0  # the longest graceful_shutdown_timeout_s of all deployments


@message
class HoldKeys(Message):
    """Controller to host process: hold these cluster files, by name. Repeats are safe.

    Answered by HostReported once they are on disk. See core/cluster/key_rotation.py.
    """

    keys: tuple[str, str, str]
    files: tuple[bytes, ...] = field(repr=False)  # the host may lack some
    epoch: int = 0


@message
class KillReplica(Message):
    """Controller to the host process of another host: SIGKILL this replica's process."""

    process: Process
    epoch: int = 0


@message
class DescribeEnd(Message):
    """Controller to host process: how did this replica's process end? Repeats are harmless.

    A proxy asks the controller so, by the name of the replica. Answered with EndDescribed.
    """

    request_id: str
    replica: str
    address: Address  # of its actor; None from a proxy


@message
class EndDescribed(Message):
    """Host process to controller, or that to a proxy: how a replica's process ended, or ""."""

    request_id: str
    cause: str


@message
class Superseded(Message):
    """Any receiver of orders to a controller: there is a later one, so it must step down."""

    epoch: int
