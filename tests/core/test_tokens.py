"""Tokens of the HTTP API: made, found by what their holder has, revoked, kept as hashes."""

from __future__ import annotations

import pytest

from greenroom.core import operations as ops
from greenroom.core.cluster.admin import Now, carry_out
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.errors import ConflictError, UnknownNameError
from greenroom.core.lifecycle.history import Author
from greenroom.core.tokens import MAX_TOKENS, digest_of, holder, may

NOW = Now(1.0, 1000.0)


def create(cluster: Cluster, name: str, token: str = "t", **fields: object) -> None:
    asked = ops.CreateToken(
        name=name, digest=digest_of(token), **{"holder_role": "viewer", **fields}
    )
    carry_out(cluster, asked, Author("ann"), NOW)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster({}, 1, 0.0)


def test_a_token_is_found_by_its_text_until_it_ends(cluster: Cluster) -> None:
    create(cluster, "other", "other")
    create(cluster, "ci", "secret", expires_at=2000.0)
    found = holder(cluster.tokens.values(), "secret", 1999.0)
    assert found is not None
    assert (found.name, found.role, found.created_at) == ("ci", "viewer", 1000.0)
    assert holder(cluster.tokens.values(), "secret", 2000.0) is None
    assert holder(cluster.tokens.values(), "Secret", 1999.0) is None


def test_only_the_hash_is_kept_and_a_successor_has_it(cluster: Cluster) -> None:
    create(cluster, "ci", "secret")
    changes = cluster.take_changes()
    assert "secret" not in repr(changes) + repr(cluster.tokens)
    next_one = Cluster({"token": {"ci": changes.puts["token", "ci"]}}, 2, 0.0)
    assert holder(next_one.tokens.values(), "secret", 0.0) is not None


def test_creating_is_idempotent_and_a_name_is_had_once(cluster: Cluster) -> None:
    create(cluster, "ci", "a")
    cluster.take_changes()
    create(cluster, "ci", "a")
    assert not cluster.take_changes()
    with pytest.raises(ConflictError, match="there is a token named 'ci' already; revoke it"):
        create(cluster, "ci", "b")


def test_a_revoked_token_is_gone_from_the_store_too(cluster: Cluster) -> None:
    create(cluster, "ci", "a")
    cluster.take_changes()
    carry_out(cluster, ops.RevokeToken(name="ci"), Author(), NOW)
    assert cluster.take_changes().deletes == {("token", "ci")}
    assert holder(cluster.tokens.values(), "a", 0.0) is None
    with pytest.raises(UnknownNameError, match="no token is named 'ci'; there are: none"):
        carry_out(cluster, ops.RevokeToken(name="ci"), Author(), NOW)


def test_there_is_a_bound(cluster: Cluster) -> None:
    for number in range(MAX_TOKENS):
        create(cluster, str(number), str(number))
    with pytest.raises(ConflictError, match="revoke those of no use"):
        create(cluster, "one more")


def test_a_role_includes_those_below_it_and_no_role_includes_none() -> None:
    assert [may("deployer", role) for role in ("viewer", "deployer", "admin", None)] == [
        True,
        True,
        False,
        False,
    ]
