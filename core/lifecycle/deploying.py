"""The requests that bring whole deployments and applications about, or undo a change.

Each finds out first what there should be, which may be refused, and changes records only then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from greenroom.core.errors import ConflictError
from greenroom.core.lifecycle import applications, deployments
from greenroom.core.lifecycle.deployments import SpecLike
from greenroom.core.lifecycle.goals import Subject
from greenroom.core.lifecycle.history import described_changes, undone
from greenroom.core.lifecycle.lost import parts_of
from greenroom.core.lifecycle.releases import folders_of
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    ApplicationRecord,
    BackendDefinition,
    BackendRecord,
    Definition,
    Definitions,
    EndpointRecord,
    Key,
    Release,
)

if TYPE_CHECKING:
    from greenroom.core.cluster.state import Cluster
    from greenroom.core.lifecycle.goals import Subject


# From definitions to records: brings about what a deploy or an undo asks for.


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
            releases=(Release(**wanted.release),),
            application=wanted.application,
            deployment=wanted.deployment,
        )
        cluster.add_backend(record, content)
        return True
    cluster.note((BACKEND, tag))
    changed = backend.deploy(**wanted.release)
    # Equal code may have come as other bytes; then what is stored already is kept.
    if content is not None and backend.record.newest.code_digest == wanted.code_digest:
        cluster.keep_code(wanted.code_digest, content)
    cluster.touch(tag)
    return changed


def deploy_application(
    cluster: Cluster,
    name: str,
    *,
    ingress: str,
    route_prefix: str | None,
    specs: tuple[SpecLike, ...],
    folders: tuple[bytes, ...] = (),
    wall_now: float,
) -> str | None:
    """Bring an application to these deployments; return the goal, None when nothing changes.

    ``folders`` are zips of folders that the deployments work in, where they may not be stored yet.
    """
    wanted = applications.wanted(cluster, name, ingress, route_prefix, specs)
    code = {**_code(specs), **by_digest(folders)}
    _check_folders(cluster, wanted, code)
    return apply(
        cluster,
        wanted,
        code=code,
        subject=("application", name),
        what="deploy application",
        wall_now=wall_now,
    )


def plan_application(
    cluster: Cluster,
    name: str,
    *,
    ingress: str,
    route_prefix: str | None,
    specs: tuple[SpecLike, ...],
) -> list[dict[str, Any]]:
    """Return what :func:`deploy_application` would change, and change nothing."""
    wanted = applications.wanted(cluster, name, ingress, route_prefix, specs)
    before = {key: cluster.definition(key) for key in wanted}
    return described_changes(before, wanted)


def delete_application(cluster: Cluster, name: str, wall_now: float) -> str | None:
    """Drop an application's endpoints at once, and have its backends drained.

    Harmless when there is none.
    """
    unwanted = applications.unwanted(cluster, name)
    cluster.forget_lost(parts_of(name, cluster.lost))
    return _delete(cluster, unwanted, (APPLICATION, name), wall_now)


def deploy(
    cluster: Cluster,
    spec: SpecLike,
    *,
    route_prefix: str | None,
    prev_version: str | None,
    folders: tuple[bytes, ...] = (),
    wall_now: float,
) -> str | None:
    """Bring a deployment about; return the goal, None when nothing changes."""
    wanted = deployments.wanted(cluster, spec, route_prefix, prev_version)
    code = {**_code((spec,)), **by_digest(folders)}
    _check_folders(cluster, wanted, code)
    return apply(
        cluster,
        wanted,
        code=code,
        subject=("deployment", spec.name),
        what="deploy",
        wall_now=wall_now,
    )


def delete_deployment(cluster: Cluster, name: str, wall_now: float) -> str | None:
    """Delete a deployment's endpoint at once, and have its backend drained.

    Harmless when there is none.
    """
    unwanted = deployments.unwanted(cluster, name)
    cluster.forget_lost({(BACKEND, name), (ENDPOINT, name)})
    return _delete(cluster, unwanted, ("deployment", name), wall_now)


def delete_everything(cluster: Cluster, wall_now: float) -> list[str]:
    """Delete all there is, whatever names it; return the goals, those under way too."""
    goals = [delete_application(cluster, name, wall_now) for name in sorted(cluster.applications)]
    for name in list(cluster.endpoints):
        cluster.drop_endpoint(name)
    for tag in sorted(cluster.backends):
        record = cluster.backends[tag].record
        if record.application:
            continue
        subject = ("deployment" if record.deployment else BACKEND, tag)
        goals.append(_delete(cluster, {(BACKEND, tag): None}, subject, wall_now))
    cluster.forget_lost(set(cluster.lost))
    return [goal for goal in goals if goal is not None]


def _delete(
    cluster: Cluster, unwanted: Definitions, subject: Subject, wall_now: float
) -> str | None:
    what = f"delete {subject[0]}"
    return apply(cluster, unwanted, code={}, subject=subject, what=what, wall_now=wall_now)


def undo(cluster: Cluster, entry_id: int | None, wall_now: float) -> dict[str, Any]:
    """Restore what was before a change, the last one by default; ConflictError if that cannot be.

    Returns what it undid, and the goal of doing so.
    """
    entry = cluster.history.get(entry_id)
    wanted = undone(cluster, entry)
    what = f"undo {entry.id}: {entry.what}"
    before = {key: cluster.definition(key) for key in wanted}
    subject = _subject(wanted)
    goal = apply(cluster, wanted, code={}, subject=subject, what=what, wall_now=wall_now)
    return {
        "id": entry.id,
        "what": entry.what,
        "changes": described_changes(before, wanted),
        "goal": goal,
    }


def _subject(wanted: Definitions) -> Subject:
    for kind in (APPLICATION, BACKEND):
        for key, definition in wanted.items():
            if key[0] == kind:
                alone = getattr(definition, "deployment", "") and kind == BACKEND
                return ("deployment", key[1]) if alone else key
    return next(iter(wanted))


def _check_folders(cluster: Cluster, wanted: Definitions, given: dict[str, bytes]) -> None:
    """Raise ConflictError unless every folder is stored, or given."""
    for (_, name), definition in wanted.items():
        if isinstance(definition, BackendDefinition):
            check_folders(cluster, name, folders_of(definition) - given.keys())


def check_folders(cluster: Cluster, name: str, folders: Iterable[str]) -> None:
    """Raise ConflictError unless all of these are stored."""
    for folder in folders:
        if not cluster.code_use.is_stored(folder):
            raise ConflictError(
                f"the working_dir of {name!r} (zip {folder}) is not stored any more; "
                "deploy it again"
            )


def _code(specs: tuple[SpecLike, ...]) -> dict[str, bytes]:
    return by_digest(spec.code for spec in specs)


def by_digest(contents: Iterable[bytes]) -> dict[str, bytes]:
    """Return code, or zips, by their sha256."""
    return {hashlib.sha256(content).hexdigest(): content for content in contents}
