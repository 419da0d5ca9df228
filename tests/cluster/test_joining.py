"""Hosts join, answer every route, show everywhere, and leave."""

from __future__ import annotations

from tests.support.cluster import Cluster


def test_a_host_joins_and_every_host_answers_and_shows_all(serving: Cluster) -> None:
    everyone = {"a": "RUNNING", "b": "RUNNING", "c": "RUNNING"}
    for host in serving.hosts:
        assert host.hosts() == everyone
        status, body = host.get("/")
        assert (status, body[:12]) == (200, "default#Who#")
        assert host.replicas("default#Who")[body] == host.label  # its own, while it has room
    assert sorted(serving.hosts[1].replicas("default#Who").values()) == ["a", "b", "c"]
