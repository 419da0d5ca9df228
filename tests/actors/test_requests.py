"""What becomes of requests that a client repeats: they may arrive when it has gone on already."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.actors.controller.requests import Requests
from greenroom.actors.messages import admin as am
from greenroom.core.cluster.state import Cluster


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


def create(number: int, code: bytes = b"code") -> am.CreateBackend:
    hash_of = code.decode()
    return am.CreateBackend(
        request_id=f"{number}", tag="b", code=code, code_hash=hash_of, config={}
    )


def delete(number: int) -> am.DeleteBackend:
    return am.DeleteBackend(request_id=f"{number}", tag="b", force=True)


def cluster_with_requests() -> tuple[Cluster, Requests]:
    cluster = Cluster({}, 1, 0.0)
    return cluster, Requests(cluster, {})


def gone(cluster: Cluster) -> None:
    """Have the deleted backend disappear: none of its replicas was started yet."""
    cluster.advance(0.0)
    assert "b" not in cluster.backends


def test_a_repeat_of_what_was_refused_is_refused_when_it_would_be_allowed_by_now() -> None:
    cluster, requests = cluster_with_requests()
    ask(requests, create(1))
    refusal = ask(requests, create(2, b"other"))
    assert refusal.error_kind == "ConflictError"
    ask(requests, delete(3))
    gone(cluster)
    assert ask(requests, create(2, b"other")) == refusal
    assert "b" not in cluster.backends
    assert ask(requests, create(4, b"other")).error_kind == ""


def test_a_repeat_of_what_changed_nothing_changes_nothing_later() -> None:
    cluster, requests = cluster_with_requests()
    ask(requests, create(1))
    unchanged = ask(requests, create(2))
    ask(requests, delete(3))
    gone(cluster)
    assert ask(requests, create(2)) == unchanged
    assert "b" not in cluster.backends


def test_who_waits_for_a_goal_and_asks_no_more_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, requests = cluster_with_requests()
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    goal = ask(requests, create(1)).value

    def wait(number: int) -> None:
        requests.take(am.WaitForGoal(request_id=f"wait {number}", goal_id=goal), Client())

    wait(0)
    for number in range(1, 1_000):
        now += 2.0
        wait(0)  # repeats, as clients do
        wait(number)  # gave up soon
        assert requests.take_answers() == []
    parked: Any = requests._parked
    assert len(parked) == 32
    requests.take(delete(2), Client())  # a later goal of the same backend ends this one
    answered = {reply.request_id for _, reply in requests.take_answers()}
    assert answered > {"2", "wait 0", "wait 999"}
    assert len(answered) == 33
    assert requests.due_at() == float("inf")


def test_answers_are_kept_for_the_last_requests_only_and_not_what_was_read() -> None:
    _, requests = cluster_with_requests()
    for number in range(1_010):
        ask(requests, delete(number))
    ask(requests, am.ListBackends(request_id="read"))
    kept: Any = requests._settled
    assert len(kept) == 1_000
    assert "read" not in kept
    assert ("9" in kept, "10" in kept, "1009" in kept) == (False, True, True)


@pytest.mark.parametrize(
    ("request_of", "told"),
    [
        (am.DeleteEndpoint(request_id="1", name=5), "name=5: must be a string"),  # type: ignore[arg-type]
        (am.DeleteEndpoint(request_id="1", name=None), "name=None: must be a string"),  # type: ignore[arg-type]
        (am.GetBackendConfig(request_id="1", tag=["b"]), "tag=['b']: must be a string"),  # type: ignore[arg-type]
        (am.WaitForGoal(request_id="1", goal_id=7), "goal_id=7: must be a string"),  # type: ignore[arg-type]
        (
            am.DeleteBackend(request_id="1", tag="b", force="no"),  # type: ignore[arg-type]
            "force='no': must be True or False",
        ),
        (
            am.UndoChange(request_id="1", change_id="1"),  # type: ignore[arg-type]
            "change_id='1': must be a whole number or None",
        ),
        (
            am.UndoChange(request_id="1", change_id=True),
            "change_id=True: must be a whole number or None",
        ),
        (
            am.CreateBackend(
                request_id="1",
                tag="c",
                code=b"",
                code_hash="",
                config={},
                version=2,  # type: ignore[arg-type]
            ),
            "version=2: must be a string or None",
        ),
        (
            am.AbortRollout(request_id="1", endpoint=b"e"),  # type: ignore[arg-type]
            "endpoint=b'e': must be a string",
        ),
    ],
)
def test_fields_of_a_wrong_type_are_refused_by_name_and_value(
    request_of: am.Request, told: str
) -> None:
    cluster, requests = cluster_with_requests()
    ask(requests, create(0))
    cluster.take_changes()
    reply = ask(requests, request_of)
    assert (reply.error_kind, reply.error) == ("InvalidRequestError", told)
    assert not cluster.take_changes()


def test_an_answer_that_cannot_be_made_is_an_error_for_its_client_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, requests = cluster_with_requests()
    waiting, good = am.WaitForGoal(request_id="1", goal_id="g"), delete(2)
    requests.park(waiting, Client(), lambda: {}["gone"])
    requests.take(good, Client())
    replies = [reply for _, reply in requests.take_answers()]
    assert [(r.request_id, r.error_kind, r.error) for r in replies] == [
        ("2", "", ""),
        ("1", "GreenroomError", "KeyError: 'gone'"),
    ]
    assert "the answer to a request that waits failed" in caplog.text
