"""Multiplexed models in real replicas: over HTTP, through handles, on the replica that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from greenroom import serve
from tests.support.systems import wait_until


@serve.deployment(num_replicas=2)
class Many:
    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.loaded: list[str] = []

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: str) -> Any:
        self.loaded.append(model_id)
        folder = self.folder

        class Loaded:
            async def __del__(self) -> None:
                if folder:
                    Path(folder, model_id).touch()

        return Loaded()

    async def __call__(self, _request: Any = None) -> dict[str, Any]:
        model_id = serve.get_multiplexed_model_id()
        assert serve.get_request_context().multiplexed_model_id == model_id
        await self.model(model_id)
        return {
            "model": model_id,
            "replica": serve.get_replica_context().replica_tag,
            "loaded": self.loaded,
        }


def test_the_id_comes_with_the_header_and_its_queries_stay_with_the_replica_that_has_it(
    deployed, running, name
):
    deployed(Many.bind())
    found: dict[str, set[str]] = {}
    for model_id in ["a", "b", "grün"] * 6:
        headers = {"serve_multiplexed_model_id": model_id.encode().decode("latin-1")}
        status, body = running.get(f"/{name}", headers=headers)
        assert status == 200, body
        answer = json.loads(body)
        assert answer["model"] == model_id
        assert len(answer["loaded"]) == len(set(answer["loaded"]))  # each was loaded once
        found.setdefault(model_id, set()).add(answer["replica"])
    assert [len(replicas) for replicas in found.values()] == [1, 1, 1]


def test_the_id_comes_through_a_handle_and_models_are_unloaded_at_the_end(deployed, tmp_path):
    handle = deployed(Many.options(num_replicas=1).bind(str(tmp_path)))
    for model_id in "abc":
        answer = handle.options(multiplexed_model_id=model_id).remote().result(timeout_s=20)
        assert answer["model"] == model_id
    wait_until(lambda: list(tmp_path.iterdir()), 10, "one is unloaded")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    deployed(Many.options(num_replicas=1).bind())  # in its place
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 10, "the others are unloaded")
