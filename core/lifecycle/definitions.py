"""The definitions that a deploy, a deletion or an undo asks for.

A *definition* is what clients ask for of a backend, an endpoint or an application, as opposed to
how far it has come. Most functions here return the definitions that a request asks for, with None
for each one to delete, or raise ConflictError or InvalidRequestError. They change nothing, so a
plan and a deploy differ only in that what a deploy asks for is then applied:
:meth:`greenroom.core.lifecycle.state.State.apply`.

A deployment is a versioned backend together with the endpoint of the same name. In an application
both are named ``application#deployment``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from greenroom.core.errors import ConflictError, InvalidRequestError
from greenroom.core.lifecycle.endpoints import check_free
from greenroom.core.lifecycle.goals import Progress
from greenroom.core.lifecycle.history import CODE_KEPT
from greenroom.core.lifecycle.releases import digests_of
from greenroom.core.lifecycle.state import State
from greenroom.core.operations import (
    ApplicationSpec,
    CreateBackend,
    Deploy,
    DeployApplications,
    DeploymentSpec,
    PlanApplications,
)
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
    HistoryRecord,
    Key,
    candidate_of,
    served_as,
)
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX
from greenroom.core.validation import unknown_name

Wanted = dict[Key, Definition | None]

# --- Applications ---------------------------------------------------------------------------------


def qualified(application: str, deployment: str) -> str:
    """Return the name of a deployment's backend, and of its endpoint, which handles ask for."""
    return f"{application}#{deployment}"


def with_applications(
    state: State, asked: DeployApplications | PlanApplications
) -> dict[str, Wanted]:
    """Return by application what there should be, with None for others that are to go."""
    names = [spec.name for spec in asked.applications]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequestError(f"two applications have the name {twice[0]!r}")
    wanted = {}
    if not asked.keep_others:
        others = sorted(application_names(state) - set(names))
        if not asked.prune:  # what is damaged, too, is nothing that a file is known to own
            owned = state.applications
            others = [name for name in others if name in owned and owned[name].from_file]
        wanted = {name: without_application(state, name) for name in others}
    wanted |= {
        spec.name: _application_of(state, spec, from_file=asked.from_file)
        for spec in asked.applications
    }
    check_routes(state, {key: each for part in wanted.values() for key, each in part.items()})
    return wanted


def application_names(state: State) -> set[str]:
    """Return the applications that there are any parts of, whatever records are damaged.

    A candidate is not among them: it goes with its application.
    """
    names = {name.partition("#")[0] for _, name in lost_parts(state)}
    owners = {backend.record.application for backend in state.backends.values()}
    return {served_as(name) for name in {*state.applications, *owners, *names} if name}


def lost_parts(state: State, application: str | None = None) -> set[Key]:
    """Return the damaged records that are of an application, by default of any."""
    return {
        (kind, name)
        for kind, name in state.lost
        if (kind == APPLICATION or (kind in {BACKEND, ENDPOINT} and "#" in name))
        and application in {None, name.partition("#")[0]}
    }


def check_routes(state: State, wanted: Definitions) -> None:
    """Raise ConflictError if a route of these is taken by an endpoint that is not among them."""
    own = [each for each in wanted.values() if isinstance(each, EndpointRecord)]
    for endpoint in own:
        there = state.endpoints.at(endpoint.route)
        others = [other for other in there if (ENDPOINT, other.name) not in wanted]
        check_free((*others, *own), endpoint.name, endpoint.route)


def _application_of(state: State, asked: ApplicationSpec, *, from_file: bool) -> Wanted:
    name, specs = asked.name, asked.deployments
    deployments = tuple(spec.name for spec in specs)
    if asked.ingress not in deployments or len(set(deployments)) != len(deployments):
        raise InvalidRequestError(
            f"application {name!r}: deployments {list(deployments)!r} must be different and "
            f"contain the ingress {asked.ingress!r}"
        )
    wanted: Wanted = {
        (APPLICATION, name): ApplicationRecord(
            name=name,
            ingress=asked.ingress,
            route_prefix=asked.route_prefix,
            deployments=deployments,
            from_file=from_file,
        )
    }
    if (before := state.applications.get(name)) is not None:
        wanted |= _without(qualified(name, each) for each in before.deployments)
    own = {qualified(name, deployment) for deployment in deployments}
    for spec in specs:
        full_name = qualified(name, spec.name)
        route = asked.route_prefix if spec.name == asked.ingress else None
        endpoint = replace(_endpoint_of(state, full_name, route, spec.name), application=name)
        if not own >= endpoint.traffic.keys():  # it was split with one that goes now
            endpoint = replace(endpoint, traffic={full_name: 1.0})
        wanted[BACKEND, full_name] = backend_of(spec, application=name, deployment=spec.name)
        wanted[ENDPOINT, full_name] = endpoint
    return wanted


def without_application(state: State, name: str) -> Wanted:
    """Return what there should be without the application, nothing where there is none.

    Its candidate goes, too, and so do its damaged records.
    """
    wanted = _without_parts(state, name) | dict.fromkeys(lost_parts(state, name))
    if name == served_as(name):
        wanted |= _without_parts(state, candidate_of(name))
    return wanted


def _without_parts(state: State, name: str) -> Wanted:
    application = state.applications.get(name)
    if application is not None:
        names: Iterable[str] = application.deployments
    else:  # its record is damaged, or was
        own = {each.name for each in state.endpoints.values() if each.application == name}
        names = sorted(each.removeprefix(f"{name}#") for each in own | state.backends_of(name))
        if not names and (APPLICATION, name) not in state.lost:
            return {}
    return {(APPLICATION, name): None} | _without(qualified(name, each) for each in names)


def _without(names: Iterable[str]) -> Wanted:
    return dict.fromkeys((kind, name) for name in names for kind in (ENDPOINT, BACKEND))


def advance_application(state: State, name: str) -> None:
    """Forget an application that is deleted when all its backends are gone; record that it ran."""
    application = state.applications.get(name)
    if application is None:
        return
    if not application.deleting:
        _record_running(state, application)
    elif not state.backends_of(name):
        del state.applications[name]


def _record_running(state: State, application: ApplicationRecord) -> None:
    tags = [qualified(application.name, each) for each in application.deployments]
    backends = [state.backends[tag] for tag in tags if tag in state.backends]
    running = [each for each in backends if each.converged and not each.record.failure]
    if len(running) == len(tags):
        for tag in tags:
            state.record_running(tag)


def application_progress(state: State, name: str) -> Progress:
    """Return how far an application is: done when it serves and every proxy knows."""
    application = state.applications.get(name)
    if application is None:
        return Progress(done=True)
    if application.deleting:
        return Progress()
    steps = []
    for deployment in application.deployments:
        step = backend_progress(state, qualified(name, deployment))
        if step.error:
            text = f"deployment {deployment!r} of application {name!r}: {step.error}"
            return step._replace(error=text)
        steps.append(step)
    done = all(step.done for step in steps)
    return Progress(done=done, unheld=not done and all(s.done or s.unheld for s in steps))


# --- Deployments that stand alone -----------------------------------------------------------------


def with_deployment(state: State, asked: Deploy) -> Wanted:
    """Return what there should be for a deployment of its own."""
    name = asked.spec.name
    _check_version(state, name, asked.prev_version)
    backend, endpoint = state.backends.get(name), state.endpoints.get(name)
    for what, is_taken in (
        ("backend", backend is not None and not _stands_alone(backend.record)),
        ("endpoint", endpoint is not None and not endpoint.deployment),
    ):
        if is_taken:
            raise ConflictError(
                f"{what} {name!r} exists, and is not a deployment's; choose another name, or "
                "delete it first"
            )
    check_free(state.endpoints.at(asked.route_prefix), name, asked.route_prefix)
    return {
        (BACKEND, name): backend_of(asked.spec, deployment=name),
        (ENDPOINT, name): _endpoint_of(state, name, asked.route_prefix, name),
    }


def without_deployment(state: State, name: str) -> Wanted:
    """Return what there should be without the deployment; nothing where there is none."""
    if _find_deployment(state, name) is None:
        return {}
    if uses := state.endpoints.uses(name, {(ENDPOINT, name)}):
        raise ConflictError(
            f"deployment {name!r} has {uses}; delete the endpoint, set its traffic elsewhere, or "
            "end the shadow first"
        )
    return _without([name])


def deployment_record(state: State, name: str) -> BackendRecord:
    """Return the record of a deployment that stands alone, or raise UnknownNameError."""
    record = _find_deployment(state, name)
    if record is None:
        raise unknown_name("deployment", name, deployment_names(state))
    return record


def deployment_names(state: State) -> list[str]:
    """Return the names of the deployments that stand alone."""
    return sorted(name for name in state.backends if _find_deployment(state, name) is not None)


def backend_progress(state: State, name: str) -> Progress:
    """Return how far a backend is, with the endpoint of its name if it is a deployment's.

    It is done when it serves and every proxy knows.
    """
    backend = state.backends.get(name)
    if backend is None:
        return Progress(done=True)
    record = backend.record
    if record.deleting:
        return Progress()
    if error := record.failure or record.update_failure:
        return Progress(error=error, exception=record.exception)
    if not backend.converged:
        return Progress()
    held = state.long_poll.held_by_all
    done = held(BACKEND_PREFIX + name) and held(ENDPOINT_PREFIX + name)
    return Progress(done=done, unheld=not done)


def _find_deployment(state: State, name: str) -> BackendRecord | None:
    backend = state.backends.get(name)
    if backend is None or backend.record.deleting or not _stands_alone(backend.record):
        return None
    return backend.record


def _stands_alone(record: BackendRecord) -> bool:
    return bool(record.deployment) and not record.application


def _check_version(state: State, name: str, prev_version: str | None) -> None:
    if prev_version is None:
        return
    record = _find_deployment(state, name)
    if record is None:
        raise ConflictError(
            f"deployment {name!r}: prev_version is {prev_version!r}, but it is not deployed"
        )
    version = record.newest.version
    if version != prev_version:
        raise ConflictError(
            f"deployment {name!r}: prev_version is {prev_version!r}, but version {version!r} is "
            "deployed; look at what changed, then deploy on top of that"
        )


def backend_of(
    spec: CreateBackend | DeploymentSpec, *, application: str = "", deployment: str = ""
) -> BackendDefinition:
    """Return the definition of the backend that is asked for."""
    return BackendDefinition(
        code_hash=spec.code_hash,
        code_digest=hashlib.sha256(spec.code).hexdigest(),
        config=spec.config.model_dump(),
        actor_options=spec.actor_options.model_dump(),
        version=spec.version,
        application=application,
        deployment=deployment,
    )


def _endpoint_of(state: State, name: str, route: str | None, deployment: str) -> EndpointRecord:
    """Return a deployment's endpoint at this route; where its traffic goes now, it stays."""
    present = state.endpoints.get(name)
    if present is not None:
        return replace(present, route=route)
    return EndpointRecord(name=name, route=route, traffic={name: 1.0}, deployment=deployment)


# --- Undo -----------------------------------------------------------------------------------------


def without_change(state: State, entry: HistoryRecord) -> Wanted:
    """Return what there should be without a change; ConflictError saying why that cannot be."""
    wanted: Wanted = {}
    for key, before in entry.before.items():
        now = state.definition(key)
        if now == before:
            continue
        if now != entry.after[key]:
            raise _cannot_undo(entry, _changed_later(state, entry, key))
        wanted[key] = before
    if not wanted:
        raise ConflictError(
            f"change {entry.id} ({entry.what}) is undone already, or its update was rolled back: "
            "all is as it was before"
        )
    try:
        check_routes(state, wanted)
    except ConflictError as error:
        raise _cannot_undo(entry, str(error)) from None
    for (kind, name), definition in wanted.items():
        if kind == BACKEND:
            _check_backend(state, entry, name, definition, wanted)
        elif kind == ENDPOINT and isinstance(definition, EndpointRecord):
            _check_endpoint(state, entry, definition, wanted)
    return wanted


def _cannot_undo(entry: HistoryRecord, reason: str) -> ConflictError:
    return ConflictError(f"change {entry.id} ({entry.what}) cannot be undone: {reason}")


def _changed_later(state: State, entry: HistoryRecord, key: Key) -> str:
    later = state.history.after(entry, key)
    if later is None:
        return f"{key[0]} {key[1]!r} is no longer as that change left it"
    return f"change {later.id} ({later.what}) changed {key[0]} {key[1]!r} later; undo that first"


def _check_backend(
    state: State,
    entry: HistoryRecord,
    tag: str,
    definition: Definition | None,
    wanted: Definitions,
) -> None:
    if not isinstance(definition, BackendDefinition):
        if uses := state.endpoints.uses(tag, wanted):
            raise _cannot_undo(entry, f"backend {tag!r} has {uses}")
    elif not all(state.code_use.is_stored(digest) for digest in digests_of(definition)):
        raise _cannot_undo(
            entry,
            f"the code that backend {tag!r} ran is no longer stored, for only that of the last "
            f"{CODE_KEPT} changes is; deploy it from its source",
        )


def _check_endpoint(
    state: State, entry: HistoryRecord, endpoint: EndpointRecord, wanted: Definitions
) -> None:
    for tag in (*endpoint.traffic, *endpoint.shadows):
        key = (BACKEND, tag)
        if (wanted[key] if key in wanted else state.definition(key)) is None:
            raise _cannot_undo(
                entry, f"endpoint {endpoint.name!r} used backend {tag!r}, which is gone"
            )
