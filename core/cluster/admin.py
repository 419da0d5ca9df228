"""How each admin operation is carried out over the cluster; see :mod:`greenroom.core.operations`.

Each operation first works out the wanted definitions, which may fail, and only then changes
records. So an operation that raises has changed nothing, and repeating a completed operation
changes nothing either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from greenroom.core import operations as ops
from greenroom.core.cluster import status
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.config import as_written
from greenroom.core.errors import ConflictError, InvalidRequestError
from greenroom.core.lifecycle import definitions, history
from greenroom.core.lifecycle.endpoints import (
    check_free,
    described,
    is_made_alike,
    new_endpoint,
    owner_of,
    told_uses,
    with_shadow,
)
from greenroom.core.lifecycle.goals import Subject
from greenroom.core.lifecycle.releases import folders_of
from greenroom.core.lifecycle.state import State
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    DEPLOYMENT,
    ENDPOINT,
    BackendDefinition,
    Definitions,
    TokenRecord,
)
from greenroom.core.tokens import MAX_TOKENS
from greenroom.core.validation import unknown_name


class Now(NamedTuple):
    """The time of an operation: monotonic seconds, and seconds since the epoch."""

    monotonic: float
    wall: float


Carry = Callable[[Cluster, Any, Now], Any]


def carry_out(cluster: Cluster, asked: ops.Operation, author: history.Author, now: Now) -> Any:
    """Carry out an operation of the table, and return its answer.

    A repeat of a request that was carried out changes nothing, and gets the same answer.
    """
    carry = CARRIED_OUT.get(type(asked))
    if carry is None:
        raise InvalidRequestError(f"{asked.key} is not an operation of the cluster's state")
    if asked.is_read:
        return carry(cluster, asked, now)
    told = asked.told
    if isinstance(asked, ops.UndoChange):
        told = f"undo change {cluster.history.get(asked.change_id).id}"
    return cluster.state.change(author, told, lambda: carry(cluster, asked, now), now.wall)


# --- Backends -------------------------------------------------------------------------------------


def _create_backend(cluster: Cluster, asked: ops.CreateBackend, _now: Now) -> str | None:
    state, tag = cluster.state, asked.tag
    definition = definitions.backend_of(asked)
    wanted, code = {(BACKEND, tag): definition}, _by_digest((asked.code, *asked.folders))
    _check_folders(state, wanted, code)
    present = state.backends.get(tag)
    if present is not None:
        if present.record.deleting:
            raise ConflictError(f"backend {tag!r} is being deleted; wait for that goal first")
        newest = present.record.newest
        made_of = (newest.code_hash, present.config, newest.actor_options)
        if made_of != (asked.code_hash, asked.config, definition.actor_options):
            raise ConflictError(
                f"backend {tag!r} exists with other code or settings; use update_backend_config, "
                "or delete it first"
            )
        if not present.record.failure:
            if newest.code_digest in code:
                state.keep_code(newest.code_digest, code[newest.code_digest])
            return state.goals.pending_for((BACKEND, tag))
    return _bring_about(cluster, wanted, (BACKEND, tag), "create backend", code)


def _update_backend_config(
    cluster: Cluster, asked: ops.UpdateBackendConfig, _now: Now
) -> str | None:
    state, tag = cluster.state, asked.tag
    backend = state.backend(tag)
    config = backend.config.updated(asked.changes)
    if not state.redefine(tag, lambda: backend.set_config(config)):
        return state.goals.pending_for((BACKEND, tag))
    # A goal under way is reached with the new settings, and only so.
    return state.goals.pending_for((BACKEND, tag)) or state.new_goal(
        (BACKEND, tag), "update backend config"
    )


def _delete_backend(cluster: Cluster, asked: ops.DeleteBackend, _now: Now) -> str | None:
    state, tag = cluster.state, asked.tag
    backend = state.backends.get(tag)
    if backend is None:
        state.forget_lost({(BACKEND, tag)})
        return None
    if owner := owner_of(backend.record):
        raise ConflictError(f"backend {tag!r} belongs to {owner}; delete or redeploy that")
    cluster.rollouts.check_unused(tag)
    if uses := told_uses(state.endpoints.using(tag), tag):
        raise ConflictError(
            f"backend {tag!r} has {uses}; delete the endpoint, set its traffic elsewhere, or end "
            "the shadow first"
        )
    if backend.record.deleting and (backend.record.force or not asked.force):
        return state.goals.pending_for((BACKEND, tag))
    state.redefine(tag, lambda: backend.delete(force=asked.force))
    return state.new_goal((BACKEND, tag), "delete backend")


# --- Endpoints ------------------------------------------------------------------------------------


def _create_endpoint(cluster: Cluster, asked: ops.CreateEndpoint, _now: Now) -> None:
    """Name a backend, unless the endpoint was made by the same call.

    It is the same call, too, when the endpoint's traffic was moved meanwhile: scripts that set up
    an endpoint and then its traffic may run again.
    """
    state, record = cluster.state, new_endpoint(asked)
    present = state.endpoints.get(asked.name)
    if present is not None and is_made_alike(present, record):
        return
    state.backend(asked.backend)
    if present is not None:
        raise ConflictError(
            f"endpoint {asked.name!r} exists with other settings: {described(present)}; "
            "delete it first"
        )
    state.check_usable(f"endpoint {asked.name!r}: backend", [asked.backend])
    check_free(state.endpoints.at(asked.route), asked.name, asked.route)
    state.put_endpoint(record)


def _delete_endpoint(cluster: Cluster, asked: ops.DeleteEndpoint, _now: Now) -> None:
    present = cluster.endpoints.get(asked.name)
    if present is None:
        cluster.state.forget_lost({(ENDPOINT, asked.name)})
        return
    if owner := owner_of(present):
        raise ConflictError(f"endpoint {asked.name!r} belongs to {owner}; delete that")
    cluster.state.drop_endpoint(asked.name)


def _set_traffic(cluster: Cluster, asked: ops.SetTraffic, _now: Now) -> None:
    state, name = cluster.state, asked.endpoint
    present = state.endpoint(name)
    what = f"traffic of endpoint {name!r}: weights"
    state.check_usable(what, asked.weights, present.application)
    cluster.rollouts.check_traffic(name)
    if present.traffic != asked.weights:
        state.put_endpoint(replace(present, traffic=asked.weights))


def _shadow_traffic(cluster: Cluster, asked: ops.ShadowTraffic, _now: Now) -> None:
    state = cluster.state
    present = state.endpoint(asked.endpoint)
    if asked.proportion:
        state.check_usable(f"shadow of endpoint {asked.endpoint!r}: backend", [asked.backend])
    changed = with_shadow(present, asked)
    if changed != present:
        state.put_endpoint(changed)


# --- Deployments and applications -----------------------------------------------------------------


def _deploy_applications(
    cluster: Cluster, asked: ops.DeployApplications, now: Now
) -> dict[str, Any]:
    """Make the applications be these, all or none of it; return goals, version and changed ones."""
    state = cluster.state
    _check_version(state, asked.if_version)
    by_application = definitions.with_applications(state, asked)
    specs = (spec for each in asked.applications for spec in each.deployments)
    code = _by_digest((*(spec.code for spec in specs), *asked.folders))
    for wanted in by_application.values():
        _check_folders(state, wanted, code)
    given = {each.name for each in asked.applications}
    before = {key: state.definition(key) for part in by_application.values() for key in part}
    canaries = cluster.canaries
    under_way = {name for name in given if canaries.is_under_way(name, by_application[name])}
    staying = under_way | {
        name
        for name in given - under_way
        if asked.canary is not None and canaries.is_for(name, by_application[name])
    }
    moving = [part for name, part in by_application.items() if name not in staying]
    # A canary leaves its application's route where it is for now.
    definitions.check_routes(state, {key: each for part in moving for key, each in part.items()})
    goals, changed, is_new = {}, [], False
    for name, wanted in by_application.items():
        what = "deploy application" if name in given else "delete application"
        if name not in given:
            state.forget_lost(definitions.lost_parts(state, name))
        pending = cluster.goals.pending_for((APPLICATION, name))
        if name in under_way:
            goal = pending
        elif asked.canary is not None and name in staying:
            goal = canaries.start(name, wanted, asked.canary, code, now.wall)
            is_new = True
        else:
            canaries.forget(name)
            goal = _bring_about(cluster, wanted, (APPLICATION, name), what, code)
        if goal is not None:
            goals[name] = goal
            changed += [name] * (goal != pending)
    is_new |= any(state.definition(key) != each for key, each in before.items())
    return {"goals": goals, "version": state.history.last_id + is_new, "changed": changed}


def _check_version(state: State, wanted: int | None) -> None:
    version = state.history.last_id
    if wanted in {None, version}:
        return
    last = f"; the last change was: {state.history.get(None).what}" if version else ""
    raise ConflictError(
        f"if_version is {wanted}, but the version is {version}{last}; look at what changed, then "
        "deploy on top of that"
    )


def _plan_applications(cluster: Cluster, asked: ops.PlanApplications, _now: Now) -> dict[str, Any]:
    by_application = definitions.with_applications(cluster.state, asked)
    wanted = {key: each for part in by_application.values() for key, each in part.items()}
    before = {key: cluster.state.definition(key) for key in wanted}
    return {
        "version": cluster.history.last_id,
        "changes": history.described_changes(before, wanted),
    }


def _delete_application(cluster: Cluster, asked: ops.DeleteApplication, _now: Now) -> str | None:
    """Drop an application's endpoints at once, and drain its backends."""
    state, name = cluster.state, asked.application
    cluster.canaries.check_no_candidate(name)
    unwanted = definitions.without_application(state, name)
    state.forget_lost(definitions.lost_parts(state, name))
    return _bring_about(cluster, unwanted, (APPLICATION, name), "delete application")


def _deploy(cluster: Cluster, asked: ops.Deploy, _now: Now) -> str | None:
    wanted = definitions.with_deployment(cluster.state, asked)
    code = _by_digest((asked.spec.code, *asked.folders))
    _check_folders(cluster.state, wanted, code)
    return _bring_about(cluster, wanted, (DEPLOYMENT, asked.spec.name), "deploy", code)


def _delete_deployment(cluster: Cluster, asked: ops.DeleteDeployment, _now: Now) -> str | None:
    """Drop a deployment's endpoint at once, and drain its backend."""
    name = asked.name
    unwanted = definitions.without_deployment(cluster.state, name)
    cluster.state.forget_lost({(BACKEND, name), (ENDPOINT, name)})
    return _bring_about(cluster, unwanted, (DEPLOYMENT, name), "delete deployment")


def _delete_everything(cluster: Cluster, _asked: ops.DeleteEverything, now: Now) -> list[str]:
    """Delete all there is, whatever names it; return the goals, those under way too."""
    goals = [
        _delete_application(cluster, ops.DeleteApplication(application=name), now)
        for name in sorted(definitions.application_names(cluster.state))
    ]
    for name in list(cluster.endpoints):
        cluster.state.drop_endpoint(name)
    for tag in sorted(cluster.backends):
        record = cluster.backends[tag].record
        if not record.application:
            kind = DEPLOYMENT if record.deployment else BACKEND
            goals.append(
                _bring_about(cluster, {(BACKEND, tag): None}, (kind, tag), f"delete {kind}")
            )
    cluster.state.forget_lost(set(cluster.state.lost))
    return [goal for goal in goals if goal is not None]


def _undo_change(cluster: Cluster, asked: ops.UndoChange, _now: Now) -> dict[str, Any]:
    """Restore what was before a change, as a change of its own."""
    entry = cluster.history.get(asked.change_id)
    if not entry.after:
        raise InvalidRequestError(
            f"change {entry.id}, {entry.what}, changed no definition, so there is nothing to undo; "
            "end a rollout with `greenroom rollout ENDPOINT --abort`, revoke a token with "
            "`greenroom token`, or give the id of another change"
        )
    for kind, name in entry.before:
        if kind == BACKEND and entry.before[kind, name] is None:
            cluster.rollouts.check_unused(name, leaving=entry.before)
    wanted = definitions.without_change(cluster.state, entry)
    before = {key: cluster.state.definition(key) for key in wanted}
    goal = _bring_about(cluster, wanted, _subject(wanted), f"undo {entry.id}: {entry.what}")
    return {
        "id": entry.id,
        "what": entry.what,
        "changes": history.described_changes(before, wanted),
        "goal": goal,
    }


def _subject(wanted: Definitions) -> Subject:
    for kind in (APPLICATION, BACKEND):
        for key, definition in wanted.items():
            if key[0] == kind:
                is_alone = isinstance(definition, BackendDefinition) and definition.deployment
                return (DEPLOYMENT, key[1]) if is_alone else key
    return next(iter(wanted))


# --- Tokens of the HTTP API -----------------------------------------------------------------------


def _create_token(cluster: Cluster, asked: ops.CreateToken, now: Now) -> None:
    present = cluster.tokens.get(asked.name)
    if present is not None and present.digest == asked.digest:
        return
    if present is not None:
        raise ConflictError(
            f"there is a token named {asked.name!r} already; revoke it, or take another name"
        )
    if len(cluster.tokens) >= MAX_TOKENS:
        raise ConflictError(f"there are {MAX_TOKENS} tokens already; revoke those of no use")
    cluster.tokens[asked.name] = TokenRecord(
        name=asked.name,
        digest=asked.digest,
        role=asked.holder_role,
        created_at=now.wall,
        expires_at=asked.expires_at,
    )
    cluster.state.enter()


def _revoke_token(cluster: Cluster, asked: ops.RevokeToken, _now: Now) -> None:
    if cluster.tokens.pop(asked.name, None) is None:
        raise unknown_name("token", asked.name, cluster.tokens)
    cluster.state.enter()


# --- Bringing it about ----------------------------------------------------------------------------


def _bring_about(
    cluster: Cluster,
    wanted: Definitions,
    subject: Subject,
    what: str,
    code: Mapping[str, bytes] = definitions.NO_CODE,
) -> str | None:
    """Bring about definitions; return the goal of that, None where nothing changes."""
    if not definitions.bring_about(cluster.state, wanted, code):
        return cluster.goals.pending_for(subject)
    return cluster.state.new_goal(subject, what)


def _check_folders(state: State, wanted: Definitions, given: Mapping[str, bytes]) -> None:
    """Raise ConflictError unless every folder is stored, or given."""
    for (_, name), definition in wanted.items():
        if isinstance(definition, BackendDefinition):
            for folder in folders_of(definition) - given.keys():
                if not state.code_use.is_stored(folder):
                    raise ConflictError(
                        f"a folder of the runtime_env of {name!r} (zip {folder}) is not stored any "
                        "more; deploy it again"
                    )


def _by_digest(contents: Iterable[bytes]) -> dict[str, bytes]:
    return {hashlib.sha256(content).hexdigest(): content for content in contents}


# --- The table ------------------------------------------------------------------------------------

CARRIED_OUT: dict[type[ops.Operation], Carry] = {
    ops.CreateBackend: _create_backend,
    ops.UpdateBackendConfig: _update_backend_config,
    ops.DeleteBackend: _delete_backend,
    ops.GetBackendConfig: lambda c, asked, _: as_written(
        c.state.backend(asked.tag).config.model_dump()
    ),
    ops.ListBackends: lambda c, _asked, _: status.backends(c),
    ops.GetAutoscaling: lambda c, _asked, now: status.autoscaling(c, now.monotonic, now.wall),
    ops.GetSeries: lambda c, asked, now: status.series(c, asked, now.wall),
    ops.CreateEndpoint: _create_endpoint,
    ops.DeleteEndpoint: _delete_endpoint,
    ops.SetTraffic: _set_traffic,
    ops.ShadowTraffic: _shadow_traffic,
    ops.ListEndpoints: lambda c, _asked, _: status.endpoints(c),
    ops.GetDifferences: lambda c, asked, _: status.differences(c, asked.endpoint),
    ops.StartRollout: lambda c, asked, now: c.rollouts.start(asked, now.wall),
    ops.AbortRollout: lambda c, asked, now: c.rollouts.abort(asked.endpoint, now.wall),
    ops.PromoteRollout: lambda c, asked, now: c.rollouts.promote(asked.endpoint, now.wall),
    ops.ListRollouts: lambda c, _asked, now: c.rollouts.status(now.monotonic),
    ops.DeployApplications: _deploy_applications,
    ops.PlanApplications: _plan_applications,
    ops.DeleteApplication: _delete_application,
    ops.ListMissing: lambda c, asked, _: [
        digest for digest in asked.digests if not c.state.code_use.is_stored(digest)
    ],
    ops.Deploy: _deploy,
    ops.DeleteDeployment: _delete_deployment,
    ops.GetDeployment: lambda c, asked, _: status.deployment(c, asked.name),
    ops.ListDeployments: lambda c, _asked, _: status.deployments(c),
    ops.DeleteEverything: _delete_everything,
    ops.ListHistory: lambda c, _asked, _: [history.described(entry) for entry in c.history],
    ops.UndoChange: _undo_change,
    ops.CreateToken: _create_token,
    ops.RevokeToken: _revoke_token,
    ops.ListTokens: lambda c, _asked, _: [asdict(record) for record in c.tokens.values()],
    ops.UndrainHost: lambda c, asked, _: c.hosts.undrain(asked.host),
    ops.EvictHost: lambda c, asked, now: c.hosts.evict(asked.host, now.monotonic),
    ops.RebalanceHosts: lambda c, _asked, now: c.hosts.rebalance(now.monotonic),
}
