"""docs/monitoring.md names all metrics that there are, with their labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from greenroom.actors.messages.queries import Process
from greenroom.actors.proxy.host_metrics import HostMetrics, Metrics
from greenroom.actors.replica import context, metrics as of_replica
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import RunRecords
from greenroom.core.cluster import status
from greenroom.core.metrics import Group
from greenroom.http_front.access_log import AccessLog
from greenroom.http_front.grpc.calls import Applications, Servicers
from greenroom.http_front.request import Requests
from tests.core.worlds import World

PAGE = Path(__file__).parents[2] / "docs/monitoring.md"
ROW = re.compile(r"^\| `(greenroom_\w+)` \| ([\w, ]*?) ?\|", re.MULTILINE)


def labels_by_name(groups: list[Group]) -> dict[str, set[str]]:
    return {
        family.name: {*labels, *family.labels} - {"host"}
        for labels, families in groups
        for family in families
        if family.name.startswith("greenroom_")
    }


def test_the_table_has_all_metrics_and_no_other(tmp_path):
    replica = context.ReplicaContext(
        app_name="a", deployment="d", replica_tag="r", backend="b", version=None
    )
    context.install(replica)
    try:
        of_replicas = of_replica.collect(0, 0)
    finally:
        context.install(None)
    records = RunRecords(tmp_path)
    process: Process = this_process()
    records.add(process, "proxy")
    host = HostMetrics(records, "h").groups(Metrics().families({}, {}))
    worker = Requests(AccessLog(tmp_path / "access.log")).metrics()
    link: Any = None  # it asks nothing
    rpcs: Group = ({}, Servicers(link, Applications(link), None, 1).metrics())
    of_controller = status.metrics(World().cluster, "h")
    rows = ROW.findall(PAGE.read_text())
    table = {name: set(filter(None, labels.split(", "))) for name, labels in rows}
    assert table == labels_by_name([*of_replicas, *host, *worker, rpcs, *of_controller])
