"""How each admin operation is carried out over the cluster; see :mod:`greenroom.core.operations`.

An operation on records returns the :class:`Change` that it wants, and may fail; it changes nothing
itself. Repeating a completed operation changes nothing either. Operations on hosts act.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from greenroom.core import operations as ops
from greenroom.core.cluster import status
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.cluster.hosts import HostState
from greenroom.core.config import as_written
from greenroom.core.errors import ConflictError, InvalidRequestError
from greenroom.core.lifecycle import definitions, history
from greenroom.core.lifecycle.endpoints import (
    check_free,
    described,
    is_made_alike,
    new_endpoint,
    owner_of,
    with_shadow,
)
from greenroom.core.lifecycle.releases import folders_of
from greenroom.core.lifecycle.state import DEPLOYED, Change, Made, State
from greenroom.core.lifecycle.steps import rebalance
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    CODE,
    DEPLOYMENT,
    ENDPOINT,
    BackendDefinition,
    Definitions,
    Key,
    TokenRecord,
)
from greenroom.core.rollouts.rollouts import PROMOTED, WENT_BACK
from greenroom.core.tokens import MAX_TOKENS
from greenroom.core.validation import unknown_name


class Now(NamedTuple):
    """The time of an operation: monotonic seconds, and seconds since the epoch."""

    monotonic: float
    wall: float


ASKED_S = 60.0  # clients repeat what they wait for; one that has not for so long is gone
PENDING = object()
TURN = "turn"  # the event of each turn


@dataclass(frozen=True)
class Later:
    """An answer that waits: ``poll`` returns it, raises why there is none, or returns PENDING.

    Past ``timeout_s`` the request is answered with an error. With ``while_asked`` each repeat
    begins that time anew, and past it the request is forgotten. ``upon`` is the event after which
    it is tried.
    """

    poll: Callable[[], Any]
    timeout_s: float = float("inf")
    while_asked: bool = False
    upon: Hashable = TURN


Carry = Callable[[Cluster, Any, Now], Any]


def carry_out(cluster: Cluster, asked: ops.Operation, author: history.Author, now: Now) -> Any:
    """Carry out an operation of the table, and return its answer.

    A repeat of a request that was carried out changes nothing, and gets the same answer.
    """
    carry = CARRIED_OUT.get(type(asked))
    if carry is None:
        raise InvalidRequestError(f"{asked.key} is not an operation of the cluster's state")
    if not asked.is_read and (repeated := cluster.state.history.answered(author.request_id)):
        return repeated.answer
    description = asked.description
    if isinstance(asked, ops.UndoChange):
        description = f"undo change {cluster.state.history.get(asked.change_id).id}"
    change = carry(cluster, asked, now)
    if not isinstance(change, Change):
        return change  # the answer of what reads, or acts on hosts
    return cluster.state.apply(author, description, change, now.wall)


# --- Backends -------------------------------------------------------------------------------------


def _create_backend(cluster: Cluster, asked: ops.CreateBackend, _now: Now) -> Change:
    state, tag = cluster.state, asked.tag
    definition = definitions.backend_of(asked)
    key, code = (BACKEND, tag), _by_digest((asked.code, *asked.folders))
    _check_folders(state, {key: definition}, code)
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
    return Change(wanted={key: definition}, code=code, subject=key, what="create backend")


def _update_backend_config(cluster: Cluster, asked: ops.UpdateBackendConfig, _now: Now) -> Change:
    key = BACKEND, asked.tag
    config = cluster.state.backend(asked.tag).config.updated(asked.changes)
    present = cluster.state.definition(key)
    assert isinstance(present, BackendDefinition), "it is not being deleted"
    wanted = {key: replace(present, config=config.model_dump())}
    return Change(wanted=wanted, subject=key, what="update backend config", joins=True)


def _delete_backend(cluster: Cluster, asked: ops.DeleteBackend, _now: Now) -> Change:
    state, tag = cluster.state, asked.tag
    wanted = Change(wanted={(BACKEND, tag): None}, force=asked.force)
    backend = state.backends.get(tag)
    if backend is None:
        return wanted
    if owner := owner_of(backend.record):
        raise ConflictError(f"backend {tag!r} belongs to {owner}; delete or redeploy that")
    if uses := state.endpoints.uses(tag):
        raise ConflictError(
            f"backend {tag!r} has {uses}; delete the endpoint, set its traffic elsewhere, or end "
            "the shadow first"
        )
    return wanted._replace(subject=(BACKEND, tag), what="delete backend")


# --- Endpoints ------------------------------------------------------------------------------------


def _create_endpoint(cluster: Cluster, asked: ops.CreateEndpoint, _now: Now) -> Change:
    """Name a backend, unless the endpoint was made by the same call.

    It is the same call, too, when the endpoint's traffic was moved meanwhile: scripts that set up
    an endpoint and then its traffic may run again.
    """
    state, record = cluster.state, new_endpoint(asked)
    present = state.endpoints.get(asked.name)
    if present is not None and is_made_alike(present, record):
        return Change()
    state.backend(asked.backend)
    if present is not None:
        raise ConflictError(
            f"endpoint {asked.name!r} exists with other settings: {described(present)}; "
            "delete it first"
        )
    state.check_usable(f"endpoint {asked.name!r}: backend", [asked.backend])
    check_free(state.endpoints.at(asked.route), asked.name, asked.route)
    return Change(wanted={(ENDPOINT, asked.name): record})


def _delete_endpoint(cluster: Cluster, asked: ops.DeleteEndpoint, _now: Now) -> Change:
    present = cluster.state.endpoints.get(asked.name)
    if present is not None and (owner := owner_of(present)):
        raise ConflictError(f"endpoint {asked.name!r} belongs to {owner}; delete that")
    return Change(wanted={(ENDPOINT, asked.name): None})


def _set_traffic(cluster: Cluster, asked: ops.SetTraffic, _now: Now) -> Change:
    state, name = cluster.state, asked.endpoint
    present = state.endpoint(name)
    what = f"traffic of endpoint {name!r}: weights"
    state.check_usable(what, asked.weights, present.application)
    cluster.rollouts.check_traffic(name)
    return Change(wanted={(ENDPOINT, name): replace(present, traffic=asked.weights)})


def _shadow_traffic(cluster: Cluster, asked: ops.ShadowTraffic, _now: Now) -> Change:
    state = cluster.state
    present = state.endpoint(asked.endpoint)
    if asked.proportion:
        state.check_usable(f"shadow of endpoint {asked.endpoint!r}: backend", [asked.backend])
    return Change(wanted={(ENDPOINT, asked.endpoint): with_shadow(present, asked)})


# --- Deployments and applications -----------------------------------------------------------------


def _deploy_applications(cluster: Cluster, asked: ops.DeployApplications, now: Now) -> Change:
    """Make the applications be these, all or none of it; return goals, version and changed ones."""
    state = cluster.state
    _check_version(state, asked.if_version)
    by_application = definitions.with_applications(state, asked)
    specs = (spec for each in asked.applications for spec in each.deployments)
    code = _by_digest((*(spec.code for spec in specs), *asked.folders))
    for wanted in by_application.values():
        _check_folders(state, wanted, code)
    given = {each.name for each in asked.applications}
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
    parts: list[Change] = []
    for name, wanted in by_application.items():
        subject = APPLICATION, name
        what = "deploy application" if name in given else "delete application"
        if name in under_way:
            parts.append(Change(subject=subject))
        elif asked.canary is not None and name in staying:
            parts += canaries.start(name, wanted, asked.canary, code, now.wall)
        else:
            parts.append(Change(then=partial(canaries.forget, name)))
            parts.append(Change(wanted=wanted, code=code, subject=subject, what=what))
    pending = {name: state.goals.pending_for((APPLICATION, name)) for name in by_application}

    def answer(made: Made) -> dict[str, Any]:
        goals = {name: made.goals[APPLICATION, name] for name in by_application}
        return {
            "goals": {name: goal for name, goal in goals.items() if goal is not None},
            "version": made.version,
            "changed": [name for name, goal in goals.items() if goal != pending[name]],
        }

    return Change(parts=tuple(parts), answer=answer)


def _check_version(state: State, wanted: int | None) -> None:
    version = state.history.last_id
    if wanted in {None, version}:
        return
    newest = [each.what for each in state.history if each.id == version]  # none, or it is lost
    last = f"; the last change was: {newest[0]}" if newest else ""
    raise ConflictError(
        f"if_version is {wanted}, but the version is {version}{last}; look at what changed, then "
        "deploy on top of that"
    )


def _plan_applications(cluster: Cluster, asked: ops.PlanApplications, _now: Now) -> dict[str, Any]:
    by_application = definitions.with_applications(cluster.state, asked)
    wanted = {key: each for part in by_application.values() for key, each in part.items()}
    before = {key: cluster.state.definition(key) for key in wanted}
    return {
        "version": cluster.state.history.last_id,
        "changes": history.described_changes(before, wanted),
    }


def _delete_application(cluster: Cluster, asked: ops.DeleteApplication, _now: Now) -> Change:
    """Drop an application's endpoints at once, and drain its backends."""
    state, name = cluster.state, asked.application
    cluster.canaries.check_no_candidate(name)
    unwanted = definitions.without_application(state, name)
    return Change(wanted=unwanted, subject=(APPLICATION, name), what="delete application")


def _deploy(cluster: Cluster, asked: ops.Deploy, _now: Now) -> Change:
    wanted = definitions.with_deployment(cluster.state, asked)
    code = _by_digest((asked.spec.code, *asked.folders))
    _check_folders(cluster.state, wanted, code)
    return Change(wanted=wanted, code=code, subject=(DEPLOYMENT, asked.spec.name), what="deploy")


def _delete_deployment(cluster: Cluster, asked: ops.DeleteDeployment, _now: Now) -> Change:
    """Drop a deployment's endpoint at once, and drain its backend."""
    name = asked.name
    unwanted = definitions.without_deployment(cluster.state, name)
    return Change(wanted=unwanted, subject=(DEPLOYMENT, name), what="delete deployment")


def _delete_everything(cluster: Cluster, _asked: ops.DeleteEverything, now: Now) -> Change:
    """Delete all there is, whatever names it; answer the goals, those under way too."""
    state = cluster.state
    parts = [
        _delete_application(cluster, ops.DeleteApplication(application=name), now)
        for name in sorted(definitions.application_names(state))
    ]
    for tag in sorted(cluster.state.backends):
        record = cluster.state.backends[tag].record
        if not record.application:
            kind = DEPLOYMENT if record.deployment else BACKEND
            unwanted: Definitions = {(BACKEND, tag): None}
            parts.append(Change(wanted=unwanted, subject=(kind, tag), what=f"delete {kind}"))
    rest = dict.fromkeys([*((ENDPOINT, name) for name in state.endpoints), *state.lost])
    return Change(
        wanted=rest,
        parts=tuple(parts),
        answer=lambda made: [goal for goal in made.goals.values() if goal is not None],
    )


def _forget_lost(cluster: Cluster, _asked: ops.ForgetLost, _now: Now) -> Change:
    lost = sorted(key for key in cluster.state.lost if key[0] not in {*DEPLOYED, CODE})
    forgotten = [list(key) for key in lost]
    return Change(wanted=dict.fromkeys(lost), is_entered=bool(lost), answer=lambda _: forgotten)


def _undo_change(cluster: Cluster, asked: ops.UndoChange, _now: Now) -> Change:
    """Restore what was before a change, as a change of its own."""
    entry = cluster.state.history.get(asked.change_id)
    if not entry.after:
        raise InvalidRequestError(
            f"change {entry.id}, {entry.what}, changed no definition, so there is nothing to undo; "
            "end a rollout with `greenroom rollout ENDPOINT --abort`, revoke a token with "
            "`greenroom token`, or give the id of another change"
        )
    wanted = definitions.without_change(cluster.state, entry)
    before = {key: cluster.state.definition(key) for key in wanted}
    shown = {
        "id": entry.id,
        "what": entry.what,
        "changes": history.described_changes(before, wanted),
    }
    return Change(
        wanted=wanted,
        subject=_subject(wanted),
        what=f"undo {entry.id}: {entry.what}",
        answer=lambda made: {**shown, "goal": next(iter(made.goals.values()))},
    )


def _subject(wanted: Definitions) -> Key:
    for kind in (APPLICATION, BACKEND):
        for key, definition in wanted.items():
            if key[0] == kind:
                is_alone = isinstance(definition, BackendDefinition) and definition.deployment
                return (DEPLOYMENT, key[1]) if is_alone else key
    return next(iter(wanted))


# --- Tokens of the HTTP API -----------------------------------------------------------------------


def _create_token(cluster: Cluster, asked: ops.CreateToken, now: Now) -> Change:
    present = cluster.tokens.get(asked.name)
    if present is not None and present.digest == asked.digest:
        return Change()
    if present is not None:
        raise ConflictError(
            f"there is a token named {asked.name!r} already; revoke it, or take another name"
        )
    if len(cluster.tokens) >= MAX_TOKENS:
        raise ConflictError(f"there are {MAX_TOKENS} tokens already; revoke those of no use")
    record = TokenRecord(
        name=asked.name,
        digest=asked.digest,
        role=asked.holder_role,
        created_at=now.wall,
        expires_at=asked.expires_at,
    )
    return Change(then=lambda: cluster.tokens.update({asked.name: record}), is_entered=True)


def _revoke_token(cluster: Cluster, asked: ops.RevokeToken, _now: Now) -> Change:
    if asked.name not in cluster.tokens:
        raise unknown_name("token", asked.name, cluster.tokens)
    return Change(then=lambda: cluster.tokens.pop(asked.name), is_entered=True)


# --- Hosts --------------------------------------------------------------------------------------


def _drain_host(cluster: Cluster, asked: ops.DrainHost, now: Now) -> Later:
    """Begin to empty a host; answer True when nothing is left there, or no other can take it.

    One that stops asks itself. What it asks for ends with its process, and when it leaves, it may
    die first, and is forgotten all the same once it is empty.
    """
    hosts, name = cluster.hosts, asked.host
    host = hosts.all.get(name)
    is_stopping = (
        host is not None and host.has_process and (host.report.get("state") == HostState.DRAINING)
    )
    if asked.leave or is_stopping:
        hosts.stop(name, now.monotonic, leaves=asked.leave)
    else:
        hosts.drain(name, force=asked.force)

    def poll() -> Any:
        if hosts.state(name) is HostState.RUNNING:
            raise ConflictError(f"host {name!r} was told meanwhile to take replicas again")
        may_stay = not asked.leave and not cluster.state.placement.can_take_over(name)
        if not (may_stay or hosts.is_empty(name)):
            return PENDING
        if asked.leave:
            hosts.forget(name, cluster.now)
        return True

    return Later(poll) if asked.leave else Later(poll, ASKED_S, while_asked=True)


def _rebalance_hosts(cluster: Cluster, _asked: ops.RebalanceHosts, now: Now) -> int:
    """Have replicas moved to where there are fewer of their backend, or fewer in all."""
    moved, held = 0, cluster.state.placement.held()
    for tag, backend in cluster.state.backends.items():
        moves = rebalance(backend, held, now.monotonic)
        if moves:
            moved += moves
            cluster.state.agenda.touch(BACKEND, tag)
    return moved


# --- Code ---------------------------------------------------------------------------------------


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
    ops.AbortRollout: lambda c, asked, _: c.rollouts.end(asked.endpoint, WENT_BACK),
    ops.PromoteRollout: lambda c, asked, _: c.rollouts.end(asked.endpoint, PROMOTED),
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
    ops.ForgetLost: _forget_lost,
    ops.ListHistory: lambda c, _asked, _: [history.described(entry) for entry in c.state.history],
    ops.UndoChange: _undo_change,
    ops.CreateToken: _create_token,
    ops.RevokeToken: _revoke_token,
    ops.ListTokens: lambda c, _asked, _: [asdict(record) for record in c.tokens.values()],
    ops.DrainHost: _drain_host,
    ops.UndrainHost: lambda c, asked, _: c.hosts.undrain(asked.host),
    ops.EvictHost: lambda c, asked, now: c.hosts.evict(asked.host, now.monotonic),
    ops.RebalanceHosts: _rebalance_hosts,
}
