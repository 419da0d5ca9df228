"""Names at their limits, through the store, the logs and the process titles."""

from __future__ import annotations

import pytest

from greenroom import serve
from greenroom.core.validation import MAX_NAME_BYTES, MAX_TAG_BYTES
from tests.actors.conftest import deploy


@pytest.mark.slow
@pytest.mark.parametrize("letter", ["a", "é", "模", "😀", "/", "%"])
def test_the_longest_names_can_be_deployed_and_deleted(running, letter):
    name = letter * (MAX_NAME_BYTES // len(letter.encode()))

    @serve.deployment(name=name)
    def answer() -> str:
        return "here"

    handle = deploy(running, answer.bind(), name, route=None)
    assert handle.remote().result(10) == "here"
    with running.as_default():
        serve.delete(name)


def test_the_longest_names_of_the_admin_client_work(client):
    tag = "t" * MAX_TAG_BYTES
    client.wait_for_goal(client.create_backend(tag, lambda: "here"))
    client.create_endpoint(tag, backend=tag)
    assert client.get_handle(tag).remote().result(10) == "here"
    client.delete_endpoint(tag)
    client.wait_for_goal(client.delete_backend(tag))
