"""Random admin histories with rollouts and canaries: definitions are only what users made."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from greenroom.core import operations as ops
from greenroom.core.errors import ConflictError, GreenroomError
from greenroom.core.records import APPLICATION, CANARY, ROLLOUT, candidate_of, is_candidates
from tests.core import requests as ask
from tests.core.worlds import Spec, World

CHANGES = 12  # so few that the code of all of them is kept
BESIDE = {"steps": (0.5, 1.0), "hold_s": 5.0, "min_samples": 10, "compare": "json"}
ROUTES = ("/", "/a", None)


def some_change(rng: random.Random) -> tuple[str, ask.Request]:
    app, tag, code = rng.choice(("shop", "blog")), rng.choice("bc"), rng.choice((b"1", b"2", b"3"))
    both = f"{app}#d", "e"
    spec = {
        "name": app,
        "ingress": "d",
        "route_prefix": rng.choice(ROUTES),
        "deployments": tuple(Spec(n, code, {}).fields for n in ("d", "inner")),
    }
    rollout = {"endpoint": "e", "to": tag, "steps": (0.5, 1.0), "hold_s": 5.0}
    asked: list[tuple[type[ops.Operation], dict[str, Any]]] = [
        (ops.DeployApplications, {"applications": (spec,), "keep_others": True}),
        (ops.DeployApplications, {"applications": (spec,), "canary": BESIDE}),
        (ops.DeployApplications, {"applications": (spec,), "canary": BESIDE, "keep_others": True}),
        (ops.DeleteApplication, {"application": app}),
        (ops.CreateBackend, {"tag": tag, "code": code, "code_hash": "h"}),
        (ops.CreateEndpoint, {"name": "e", "backend": tag, "route": rng.choice(ROUTES)}),
        (ops.DeleteEndpoint, {"name": "e"}),
        (ops.DeleteBackend, {"tag": tag}),
        (ops.SetTraffic, {"endpoint": "e", "weights": {tag: 1.0}}),
        (ops.StartRollout, rollout),
        (ops.StartRollout, rollout),
        (ops.AbortRollout, {"endpoint": rng.choice(both)}),
        (ops.PromoteRollout, {"endpoint": rng.choice(both)}),
        (ops.UndoChange, {"change_id": None}),
        (ops.UndoChange, {"change_id": None}),
        (ops.Deploy, {"spec": Spec(tag, code, {}).fields, "route_prefix": rng.choice(ROUTES)}),
        (ops.DeleteDeployment, {"name": tag}),
        (ops.DeleteEverything, {}),
    ]
    kind, fields = rng.choice(asked)
    return kind.key, ask.do(kind, **fields)


def check(world: World) -> None:
    cluster = world.cluster
    routes = Counter(
        each.route for each in cluster.state.endpoints.values() if each.route is not None
    )
    assert max(routes.values(), default=1) == 1, routes
    rollouts = {name: each.state for name, each in cluster.rollouts.records.items()}
    for name, endpoint in cluster.state.endpoints.items():
        assert not any(map(is_candidates, endpoint.traffic)) or is_candidates(name)
        assert not endpoint.shadows
        is_laid_over = cluster.state.endpoints.overlay(name) is not None
        application = endpoint.application
        canary = cluster.canaries.status(application) if application else None
        is_taking_over = canary is not None and (canary["state"], name) == (
            "taking over",
            canary["endpoint"],
        )
        assert is_laid_over == (rollouts.get(name) == "under way" or is_taking_over)
        assert 1.0 in endpoint.traffic.values(), "no step is part of a definition"
    keys = {name for entry in cluster.state.history for _, name in entry.after}
    assert not any(map(is_candidates, keys))


def check_nothing_waits(world: World) -> None:
    """Check that nothing is to be looked at when what there was comes again."""
    agenda = world.cluster.state.agenda
    for entry in world.cluster.state.history:
        for (kind, name), application in product(entry.after, ("shop", "blog")):
            agenda.happened((kind, name))
            agenda.happened((ROLLOUT, name))
            agenda.happened((CANARY, application))
            agenda.happened((APPLICATION, candidate_of(application)))
    assert agenda.next_at() > world.now


@pytest.mark.parametrize("seed", range(60))
def test_a_history_that_is_undone_wholly_ends_where_it_began(seed: int) -> None:
    rng, world, made = random.Random(seed), World(), Counter[str]()
    for _ in range(CHANGES):
        name, change = some_change(rng)
        try:
            world.change(change, name)
            made[name] += 1
        except GreenroomError:
            assert not world.cluster.state.is_torn
        world.go_on(rng.choice((0, 1, 8)), rng.choice((0.0, 1.0)))
        if rng.random() < 0.1:
            world.boot()
        check(world)
    for entry in sorted(world.cluster.state.history, key=lambda each: -each.id):
        if any(entry.before[key] != entry.after[key] for key in entry.after):
            try:
                world.change(ask.undo(entry.id))
            except ConflictError as refused:
                if "in the rollout of endpoint 'e'" not in str(refused):
                    raise
                world.change(ask.do(ops.AbortRollout, endpoint="e"))
                world.change(ask.undo(entry.id))
            check(world)
    world.converge()
    assert world.cluster.state.is_empty, (made, list(world.cluster.state.history))
    assert not world.processes
    check_nothing_waits(world)
