"""``greenroom token``: what is printed, and what the controller gets to know."""

import json
import time
from functools import partial

import pytest

from greenroom.core.tokens import digest_of


@pytest.fixture
def invoke(running, invoke):
    return partial(invoke, "token")


def test_a_token_is_printed_once_and_the_controller_gets_its_hash(invoke, controller):
    made = invoke("create", "ci", "--role", "deployer", "--expires", "12h")
    token = made.stdout.strip()
    kept = controller.cluster.tokens["ci"]
    assert token.startswith("greenroom_")
    assert len(token) > 50
    assert kept.digest == digest_of(token)
    assert kept.expires_at == pytest.approx(time.time() + 12 * 3600, abs=60)
    assert "'ci', role deployer, expires" in made.stderr
    listed = invoke("list").output
    assert listed.startswith("ci  deployer  made ")
    assert token not in listed
    (as_json,) = json.loads(invoke("list", "--json").output)
    assert (as_json["name"], as_json["role"]) == ("ci", "deployer")
    invoke("revoke", "ci")
    assert invoke("list").output == "there are no tokens\n"


def test_two_tokens_differ_and_get_names_by_their_role(invoke, controller):
    tokens = {invoke("create", "--role", "viewer", "--expires", "never").stdout for _ in range(2)}
    assert len(tokens) == 2
    assert len(controller.cluster.tokens) == 2
    for name, each in controller.cluster.tokens.items():
        assert name.startswith("viewer-")
        assert each.expires_at is None


def test_revoking_what_is_not_there_is_reported(invoke):
    refused = invoke("revoke", "ci", code=1).stderr
    assert refused == "Error: no token is named 'ci'; there are: none\n"
