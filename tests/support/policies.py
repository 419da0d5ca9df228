"""An endpoint with all that may decide on its queries at once, for tests of what dies meanwhile.

Its traffic is split, a part of it is copied to a shadow whose answers are compared, and a rollout
is under way that stands in its first step for an hour.
"""

from __future__ import annotations

from typing import Any

from greenroom import serve

ENDPOINT = "policies"
BACKENDS = ("v1", "v2", "canary", "shadow")
TRAFFIC = {"v1": 0.4, "v2": 0.4, "canary": 0.2}
SHADOWS = {"shadow": 0.5}
ANSWER = "hello"
GOAL_TIMEOUT_S = 60


def put_in_force(client: serve.Client, route: str = "/") -> None:
    """Create the endpoint and its backends, one replica each; return with the rollout's step."""

    class Hello:
        async def __call__(self, _request: object) -> str:
            return ANSWER

    config = {"max_ongoing_requests": 100}
    for goal in [client.create_backend(tag, Hello, config=config) for tag in BACKENDS]:
        client.wait_for_goal(goal, GOAL_TIMEOUT_S)
    client.create_endpoint(ENDPOINT, backend="v1", route=route)
    client.set_traffic(ENDPOINT, {"v1": 0.5, "v2": 0.5})
    for tag, proportion in SHADOWS.items():
        client.shadow_traffic(ENDPOINT, tag, proportion, compare="json")
    # Queries that a killed replica takes along count as bad, and are not to end it.
    client.rollout(
        ENDPOINT, to="canary", steps=[0.2, 1], hold_s=3600, abort_if={"error_rate": 0.99}
    )


def are_in_force(status: dict[str, Any]) -> bool:
    """Return whether all of it is as it was made, with its replicas running."""
    endpoint, rollout = status["endpoints"].get(ENDPOINT), status["rollouts"].get(ENDPOINT)
    if endpoint is None or rollout is None or rollout["state"] != "under way":
        return False
    traffic = {tag: round(weight, 9) for tag, weight in endpoint["traffic"].items()}
    return (traffic, endpoint["shadows"]) == (TRAFFIC, SHADOWS) and all(
        [replica["state"] for replica in status["backends"][tag]["replicas"]] == ["RUNNING"]
        for tag in BACKENDS
    )
