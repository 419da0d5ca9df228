"""What becomes of requests that a client repeats: they may arrive when it has gone on already."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from greenroom.actors.controller.requests import HELD_TIMEOUT_S, Requests
from greenroom.actors.messages import admin as am
from greenroom.core import operations as ops
from greenroom.core.cluster.admin import PENDING, Later
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.long_poll import NOTHING_SEEN


def applied(*deployments: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a deploy of one application."""
    deployed = {"name": "x", "ingress": "y", "route_prefix": "/x", "deployments": deployments}
    return {"applications": (deployed,)}


class Client:
    """Somebody's address, as requests read it."""

    host = "127.0.0.1"

    @property
    def addressDetails(self) -> Client:
        return self


def ask(requests: Requests, request: am.Request) -> am.RequestReply:
    requests.take(request, Client())
    ((_, reply),) = requests.take_answers()
    return reply


def create(number: int, code: bytes = b"code") -> am.Request:
    made = ops.CreateBackend(tag="b", code=code, code_hash=code.decode())
    return am.request_of(made, f"{number}")


def delete(number: int) -> am.Request:
    return am.request_of(ops.DeleteBackend(tag="b", force=True), f"{number}")


def cluster_with_requests() -> tuple[Cluster, Requests]:
    cluster = Cluster({}, 1, 0.0)
    return cluster, Requests(cluster, {})


def gone(cluster: Cluster) -> None:
    """Have the deleted backend disappear: none of its replicas was started yet."""
    cluster.advance(0.0)
    assert "b" not in cluster.state.backends


def test_a_repeat_of_what_was_refused_is_refused_when_it_would_be_allowed_by_now():
    cluster, requests = cluster_with_requests()
    ask(requests, create(1))
    refusal = ask(requests, create(2, b"other"))
    assert refusal.error_kind == "ConflictError"
    ask(requests, delete(3))
    gone(cluster)
    assert ask(requests, create(2, b"other")) == refusal
    assert "b" not in cluster.state.backends
    assert ask(requests, create(4, b"other")).error_kind == ""


def test_a_repeat_of_what_changed_nothing_changes_nothing_later():
    cluster, requests = cluster_with_requests()
    ask(requests, create(1))
    unchanged = ask(requests, create(2))
    ask(requests, delete(3))
    gone(cluster)
    assert ask(requests, create(2)) == unchanged
    assert "b" not in cluster.state.backends


def test_who_waits_for_a_goal_and_asks_no_more_is_forgotten(monkeypatch):
    cluster, requests = cluster_with_requests()
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    goal = ask(requests, create(1)).value

    def wait(number: int) -> None:
        asked = am.request_of(ops.WaitForGoal(goal_id=goal), f"wait {number}")
        requests.take(asked, Client())

    wait(0)
    for number in range(1, 1_000):
        now += 2.0
        wait(0)  # repeats, as clients do
        wait(number)  # gave up soon
        assert requests.take_answers() == []
    requests.take(delete(2), Client())  # a later goal of the same backend ends this one
    answered = {reply.request_id for _, reply in requests.take_answers()}
    assert answered > {"2", "wait 0", "wait 999"}
    assert len(answered) == 32
    cluster.advance(now)
    assert cluster.next_due_at() is None


class Proxies:
    """Two proxies of a cluster, which hold what they are told once the test says so."""

    def __init__(self, cluster: Cluster, requests: Requests) -> None:
        self._cluster, self._requests = cluster, requests
        self._upto = dict.fromkeys(("near", "far"), NOTHING_SEEN)
        self.tables: dict[str, Any] = {}
        for _ in range(3):  # until they lack nothing
            self.hold("near", "far")

    def hold(self, *proxies: str) -> list[am.RequestReply]:
        """Have these say that they hold what they were told; return what is answered."""
        for name in proxies:
            self._cluster.state.long_poll.listen(name, (1, 1, name), self._upto[name], name)
        self._cluster.advance(time.monotonic())
        for name, update in self._cluster.state.long_poll.take_updates():
            self._upto[name] = update.upto
            self.tables |= {key: table for key, (_, table) in update.snapshots.items()}
        return [reply for _, reply in self._requests.take_answers()]


def test_a_change_of_an_endpoint_is_answered_when_every_proxy_holds_it():
    cluster, requests = cluster_with_requests()
    for tag in "bc":
        made = ops.CreateBackend(tag=tag, code=b"code", code_hash="code")
        ask(requests, am.request_of(made, f"create {tag}"))
    proxies = Proxies(cluster, requests)
    created = ops.CreateEndpoint(name="e", backend="b", route="/e")
    changes: list[tuple[ops.Operation, Callable[[Any], bool]]] = [
        (created, lambda table: table.route == "/e"),
        (ops.SetTraffic(endpoint="e", weights={"c": 1.0}), lambda t: t.traffic == {"c": 1.0}),
        (
            ops.ShadowTraffic(endpoint="e", backend="b", proportion=0.5),
            lambda table: table.shadows == {"b": 0.5},
        ),
        (created, lambda _table: True),  # it is there: nothing new comes, and nothing is waited for
        (ops.DeleteEndpoint(name="e"), lambda table: table is None),
    ]
    for number, (change, is_so) in enumerate(changes):
        requests.take(am.request_of(change, str(number)), Client())
        if number != 3:
            assert proxies.hold() == []
            assert is_so(proxies.tables["endpoint/e"])
            assert proxies.hold("near") == [], "one proxy has not said that it holds it"
        ((found, error),) = [(each.request_id, each.error) for each in proxies.hold("far")]
        assert (found, error) == (str(number), "")


def test_a_proxy_that_is_silent_is_reported_as_the_reason_after_a_while(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    cluster, requests = cluster_with_requests()
    ask(requests, create(1))
    proxies = Proxies(cluster, requests)
    created = ops.CreateEndpoint(name="e", backend="b", route="/e")
    requests.take(am.request_of(created, "2"), Client())
    proxies.hold()
    now += HELD_TIMEOUT_S - 0.1
    assert proxies.hold("near") == []
    now += 0.1
    (reply,) = proxies.hold("near")
    assert "saved, but not every proxy has taken it yet" in reply.error


def test_answers_are_kept_for_the_last_requests_only_and_not_what_was_read():
    _, requests = cluster_with_requests()
    for number in range(1_010):
        ask(requests, delete(number))
    ask(requests, create(2_000))
    read = am.request_of(ops.ListBackends(), "read")
    assert list(ask(requests, read).value) == ["b"]
    assert ask(requests, delete(1_009)).value is None, "the answer is repeated"
    ask(requests, delete(2_001))
    assert ask(requests, delete(9)).value is not None, "it was forgotten, and is made anew"


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        ("no_such", {}, "the controller does not know an operation 'no_such'"),
        (["x"], {}, "the controller does not know an operation ['x']"),
        ("get_status", None, "expected its fields as a dict, not None"),
        ("get_status", {5: 5}, "expected its fields as a dict, not {5: 5}"),
        ("list_backends", {"colour": 1}, "colour=1: no such setting"),
        ("delete_endpoint", {"name": 5}, "name=5: must be a valid string"),
        ("delete_endpoint", {}, "name: must be given"),
        ("wait_for_goal", {"goal_id": 7}, "goal_id=7: must be a valid string"),
        ("delete_backend", {"tag": "b", "force": "no"}, "force='no': must be a valid bool"),
        ("undo_change", {"change_id": True}, "change_id=True: must be a valid integer"),
        ("abort_rollout", {"endpoint": b"e"}, "endpoint=b'e': must be a valid string"),
        ("set_traffic", {"endpoint": {}, "weights": None}, "endpoint={}: must be a valid string"),
        ("deploy_applications", applied(), "'x': deployments [] must be different"),
        (
            "deploy_applications",
            applied({"name": "y", "code": None}),
            "deployments[0].code=None: must",
        ),
    ],
)
def test_what_is_no_operation_or_has_bad_fields_is_refused_by_name_and_value(
    operation, fields, message
):
    cluster, requests = cluster_with_requests()
    ask(requests, create(0))
    cluster.take_changes()
    reply = ask(requests, am.Request(request_id="1", operation=operation, fields=fields))
    assert reply.error_kind == "InvalidRequestError"
    assert message in reply.error
    assert not cluster.take_changes()


def test_a_repeat_of_what_waits_is_not_carried_out_again():
    begun = []

    def rotate(_asked: ops.Operation, request_id: str) -> Later:
        begun.append(request_id)
        return Later(lambda: PENDING)

    requests = Requests(Cluster({}, 1, 0.0), {ops.RotateKey: rotate})
    for _ in range(3):
        requests.take(am.request_of(ops.RotateKey(), "1"), Client())
        assert requests.take_answers() == []
    assert begun == ["1"]


def test_fields_that_say_nothing_are_not_sent_as_an_earlier_release_may_not_know_them():
    assert am.request_of(ops.DrainHost(host="a"), "1").fields == {"host": "a"}
    forced = ops.DrainHost(host="a", force=True)
    assert am.request_of(forced, "1").fields == {"host": "a", "force": True}


def test_an_answer_that_cannot_be_made_is_an_error_for_its_client_alone(caplog):
    broken = Later(lambda: {}["gone"])
    requests = Requests(Cluster({}, 1, 0.0), {ops.RotateKey: lambda _asked, _id: broken})
    requests.take(am.request_of(ops.RotateKey(), "1"), Client())
    requests.take(delete(2), Client())
    replies = [reply for _, reply in requests.take_answers()]
    assert [(r.request_id, r.error_kind, r.error) for r in replies] == [
        ("2", "", ""),
        ("1", "GreenroomError", "KeyError: 'gone'"),
    ]
    assert "the answer to a request that waits failed" in caplog.text
