"""From definitions to records: brings about what a deploy or an undo asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from greenroom.core.code_use import folders_of
from greenroom.core.definitions import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    BackendDefinition,
    Definition,
    Definitions,
    Key,
)
from greenroom.core.goals import Subject
from greenroom.core.records import ApplicationRecord, BackendRecord, EndpointRecord

if TYPE_CHECKING:
    from greenroom.core.cluster import Cluster


def apply(
    cluster: Cluster,
    wanted: Definitions,
    *,
    code: Mapping[str, bytes],
    subject: Subject,
    what: str,
    wall_now: float,
) -> str | None:
    """Bring about definitions that have been found valid; return the goal, None for no change.

    ``code`` has by its digest what may not be stored yet.
    """
    changed = [_define(cluster, key, definition, code) for key, definition in wanted.items()]
    if not any(changed):
        return cluster.goals.pending_for(subject)
    return cluster.goals.create(subject, what, wall_now)


def _define(
    cluster: Cluster, key: Key, wanted: Definition | None, code: Mapping[str, bytes]
) -> bool:
    kind, name = key
    if isinstance(wanted, BackendDefinition):
        return _define_backend(cluster, name, wanted, code)
    if cluster.definition(key) == wanted:
        return False
    if isinstance(wanted, EndpointRecord):
        cluster.put_endpoint(wanted)
    elif isinstance(wanted, ApplicationRecord):
        cluster.put_application(wanted)
    elif kind == ENDPOINT:
        cluster.drop_endpoint(name)
    elif kind == APPLICATION:
        cluster.put_application(replace(cluster.applications[name], deleting=True))
    else:
        cluster.note(key)
        cluster.backends[name].delete()
        cluster.touch(name)
    return True


def _define_backend(
    cluster: Cluster, tag: str, wanted: BackendDefinition, code: Mapping[str, bytes]
) -> bool:
    for folder in folders_of(wanted) & code.keys():
        cluster.keep_code(folder, code[folder])
    backend = cluster.backends.get(tag)
    content = code.get(wanted.code_digest)
    if backend is None:
        record = BackendRecord(
            tag=tag,
            **wanted.release,
            application=wanted.application,
            deployment=wanted.deployment,
        )
        cluster.add_backend(record, content)
        return True
    cluster.note((BACKEND, tag))
    changed = backend.deploy(**wanted.release)
    # Equal code may have come as other bytes; then what is stored already is kept.
    if content is not None and backend.record.code_digest == wanted.code_digest:
        cluster.keep_code(wanted.code_digest, content)
    cluster.touch(tag)
    return changed
