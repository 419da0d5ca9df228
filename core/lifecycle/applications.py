"""Applications: deployments brought up together, each a backend and the endpoint of its name.

Both are named ``application#deployment``. New code is a rolling update of the backend, which goes
back by itself when the new code cannot start; see :mod:`greenroom.core.lifecycle.releases`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from greenroom.core.errors import InvalidRequestError
from greenroom.core.lifecycle.deployments import (
    SpecLike,
    backend_of,
    check_code,
    deployment_progress,
    endpoint_of,
)
from greenroom.core.lifecycle.endpoints import check_free, check_route
from greenroom.core.lifecycle.goals import Progress
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    ApplicationRecord,
    Definition,
    Key,
)
from greenroom.core.validation import wrong_with

if TYPE_CHECKING:
    from greenroom.core.cluster.state import Cluster


def qualified(application: str, deployment: str) -> str:
    """Return the name of a deployment's backend, and of its endpoint, which handles ask for."""
    return f"{application}#{deployment}"


def wanted(
    cluster: Cluster,
    name: str,
    ingress: str,
    route_prefix: str | None,
    specs: Iterable[SpecLike],
) -> dict[Key, Definition | None]:
    """Return what there should be for an application of these deployments; changes nothing.

    Raises InvalidRequestError and ConflictError.
    """
    specs = tuple(specs)
    _check(cluster, name, ingress, route_prefix, specs)
    record = ApplicationRecord(
        name=name,
        ingress=ingress,
        route_prefix=route_prefix,
        deployments=tuple(spec.name for spec in specs),
    )
    definitions: dict[Key, Definition | None] = {(APPLICATION, name): record}
    before = cluster.applications.get(name)
    for gone in () if before is None else before.deployments:
        both = qualified(name, gone)
        definitions |= {(ENDPOINT, both): None, (BACKEND, both): None}
    backends = {qualified(name, spec.name): backend_of(spec, application=name) for spec in specs}
    for spec in specs:
        both = qualified(name, spec.name)
        route = route_prefix if spec.name == ingress else None
        endpoint = replace(endpoint_of(cluster, both, route, spec.name), application=name)
        if not backends.keys() >= endpoint.traffic.keys():  # it was split with one that goes now
            endpoint = replace(endpoint, traffic={both: 1.0})
        definitions[BACKEND, both] = backends[both]
        definitions[ENDPOINT, both] = endpoint
    return definitions


def unwanted(cluster: Cluster, name: str) -> dict[Key, Definition | None]:
    """Return what there should be without the application; nothing where there is none."""
    application = cluster.applications.get(name)
    if application is not None:
        names: Iterable[str] = application.deployments
    elif (APPLICATION, name) in cluster.lost:
        names = (tag.removeprefix(f"{name}#") for tag in cluster.backends_of(name))
    else:
        return {}
    definitions: dict[Key, Definition | None] = {(APPLICATION, name): None}
    for deployment in names:
        both = qualified(name, deployment)
        definitions |= {(ENDPOINT, both): None, (BACKEND, both): None}
    return definitions


def advance(cluster: Cluster, name: str) -> None:
    """Forget an application that is deleted when all its backends are gone; note that it ran."""
    application = cluster.applications.get(name)
    if application is None:
        return
    if not application.deleting:
        _note_running(cluster, application)
    elif not cluster.backends_of(name):
        cluster.drop_application(name)


def _note_running(cluster: Cluster, application: ApplicationRecord) -> None:
    tags = [qualified(application.name, each) for each in application.deployments]
    backends = [cluster.backends[tag] for tag in tags if tag in cluster.backends]
    running = [each for each in backends if each.settled and not each.record.failure]
    if len(running) == len(tags):
        for tag in tags:
            if cluster.backends[tag].note_running():
                cluster.touch(tag)  # routers are to know


def progress(cluster: Cluster, name: str) -> Progress:
    """Tell how far an application is: done when it serves and every proxy knows."""
    application = cluster.applications.get(name)
    if application is None:
        return Progress(done=True)
    if application.deleting:
        return Progress()
    steps = []
    for deployment in application.deployments:
        step = deployment_progress(cluster, qualified(name, deployment))
        if step.error:
            text = f"deployment {deployment!r} of application {name!r}: {step.error}"
            return step._replace(error=text)
        steps.append(step)
    return Progress(done=all(step.done for step in steps))


def _check(
    cluster: Cluster,
    name: str,
    ingress: str,
    route_prefix: str | None,
    specs: tuple[SpecLike, ...],
) -> None:
    names = [spec.name for spec in specs]
    if bad := [each for each in [name, *names] if wrong_with(each)]:
        wrong = wrong_with(bad[0])
        raise InvalidRequestError(f"names {bad!r}: {wrong}")
    if ingress not in names or len(set(names)) != len(names):
        raise InvalidRequestError(
            f"application {name!r}: deployments {names!r} must be different and contain the "
            f"ingress {ingress!r}"
        )
    for spec in specs:
        # Refused here, because the first deployments of a list must not come up without the last.
        check_code(f"application {name!r}", spec)
    others = [e for e in cluster.endpoints.at(route_prefix) if e.application != name]
    check_free(others, qualified(name, ingress), check_route("route_prefix", route_prefix))
