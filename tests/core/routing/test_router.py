import pytest

from greenroom.core.routing.balancing import SATURATED_S
from greenroom.core.routing.load import busy, lacking, unready
from greenroom.core.routing.retries import MAX_ATTEMPTS, SPARE
from greenroom.core.routing.tables import BackendTable, EndpointTable
from greenroom.core.routing.tickets import Cancel, NewQuery, Refuse
from tests.core.routing.queries import (
    Ended,
    Query,
    Retried,
    RetryRefused,
    Starved,
    WatchedRouter,
    assigned,
    backend,
    endpoint,
    numbers,
    ongoing,
    only,
    replica,
    router,
)
from tests.support.memory import growth


def submit(made: WatchedRouter, *ids: int, now: float = 0.0, **query: object) -> list:
    return [e for i in ids for e in made.submit(NewQuery("c", Query(i, **query)), now)]


def statuses(effects: list) -> list[int]:
    return [effect.status for effect in only(Ended, effects)]


def refused(effects: list) -> list[tuple[int, str, str]]:
    return [(e.query_id, e.kind, e.text) for e in only(Refuse, effects)]


# --- Which replica ------------------------------------------------------------------------------


def test_a_query_goes_to_the_replica_with_the_fewest() -> None:
    made = router(backend("r1", "r2", limit=9))
    made.finished("r1", [(n, 200) for n in numbers(submit(made, 1, 2, 3, 4))[::2]], 1.0)
    assert assigned(submit(made, 5, 6)) == [("r1", 5), ("r1", 6)]


def test_equally_loaded_replicas_take_turns() -> None:
    made = router(backend("r1", "r2", "r3"))
    order = []
    for i in range(6):
        effects = submit(made, i)
        order.append(effects[0].replica)
        made.finished(effects[0].replica, [(effects[0].ticket.number, 200)], 1.0)
    assert order == ["r1", "r2", "r3", "r1", "r2", "r3"]


def test_a_query_waits_for_the_first_replica() -> None:
    made = router(backend())
    assert submit(made, 1) == [Starved("b")]
    assert assigned(made.set_backend("b", backend("r1"), 5.0)) == [("r1", 1)]


# --- Refusals -----------------------------------------------------------------------------------


def test_an_unknown_path_is_refused_with_rays_text() -> None:
    made = router(backend("r1"))
    text = "Path '/nowhere' not found. Ping /-/routes for available routes."
    refusal = Refuse("c", 1, "RouteNotFoundError", text)
    assert submit(made, 1, endpoint=None, path="/nowhere") == [refusal]
    assert made.is_empty


def test_a_method_that_the_endpoint_lacks_is_refused_naming_those_it_has() -> None:
    made = router(backend("r1"))
    made.set_endpoint("e", endpoint(methods=("GET", "PUT")), 0.0)
    text = "POST is not allowed; allowed are GET, PUT"
    refusal = Refuse("c", 1, "MethodNotAllowedError", text, None, ("GET", "PUT"))
    assert submit(made, 1, http_method="POST") == [refusal]
    assert assigned(submit(made, 2, http_method="PUT")) == [("r1", 2)]
    assert assigned(submit(made, 3)) == [("r1", 3)], "a call through a handle has no method"


def test_a_full_queue_refuses_more() -> None:
    made = router(backend("r1", limit=1, max_queued_requests=1))
    effects = submit(made, 1, 2, 3)
    text = "e has 1 queries queued, its limit"
    assert only(Refuse, effects) == [Refuse("c", 3, "BackPressureError", text, 1.0)]
    assert statuses(effects) == [503]


def test_the_longest_line_of_a_full_queue_makes_room_for_a_shorter_one() -> None:
    made = router(backend("r1", limit=1, max_queued_requests=4))
    made.set_endpoint("f", endpoint("f"), 0.0)
    submit(made, 1, 2, 3, 4, 5)
    text = "e has 4 queries queued, its limit"
    assert refused(submit(made, 6, endpoint="f")) == [(5, "BackPressureError", text)]
    text = "e has 3 queries queued, of 4 in all, the limit"
    assert refused(submit(made, 7, endpoint="f")) == [(4, "BackPressureError", text)]
    text = "f has 2 queries queued, of 4 in all, the limit"
    assert refused(submit(made, 8, endpoint="f")) == [(8, "BackPressureError", text)]
    assert refused(submit(made, 9))[0][0] == 9
    assert busy(made.state) == {"b": (4, 1)}


def test_a_wait_that_takes_too_long_is_ended_and_what_runs_goes_on() -> None:
    made = router(backend("r1", limit=1, max_queue_wait_s=2.0))
    (running,) = numbers(submit(made, 1, 2, timeout_s=60.0))
    submit(made, 3)
    assert made.next_due_at() == 2.0
    assert not made.expire(1.9)
    effects = made.expire(2.0)
    text = "no replica of e had room within 2 s, max_queue_wait_s"
    assert [(each[0], each[1], each[2]) for each in refused(effects)] == [
        (2, "BackPressureError", text),
        (3, "BackPressureError", text),
    ]
    assert busy(made.state) == {"b": (0, 1)}
    assert made.next_due_at() == 60.0, "of the one that runs"
    made.finished("r1", [(running, 200)], 3.0)
    assert busy(made.state) == {}
    assert made.next_due_at() is None


@pytest.mark.parametrize("how", ["died", "had no room", "refused under a lease"])
def test_what_is_put_back_waits_no_longer_than_it_may_either(how: str) -> None:
    made = router(backend("r1", limit=1, max_queue_wait_s=2.0))
    began_at = 1.5 if how == "died" else 0.0  # from when the time counts
    if how == "refused under a lease":
        made.submit(NewQuery("c", Query(1), is_refused=True), 0.0)
    else:
        (number,) = numbers(submit(made, 1))
    if how == "died":
        made.replica_gone("r1", (), 1.5)
    elif how == "had no room":
        made.rejected("r1", [number], 0.0, draining=False)
        assert assigned(made.expire(SATURATED_S)) == [("r1", 1)]
        made.rejected("r1", [number], 1.9, draining=True)
    assert refused(made.expire(began_at + 1.95)) == []
    text = "no replica of e had room within 2 s, max_queue_wait_s"
    assert refused(made.expire(began_at + 2.0)) == [(1, "BackPressureError", text)]
    assert busy(made.state) == {}


def test_twice_the_slots_are_expected_to_halve_the_wait() -> None:
    made = router(backend("r1", limit=1))
    (number,) = numbers(submit(made, *range(1, 12)))
    made.answered("r1", [(number, 200)], 1.0)
    (refusal,) = only(Refuse, submit(made, 21, now=1.0, timeout_s=5.0))
    assert refusal.retry_after_s == 9.0
    made.set_backend("b", backend("r1", "r2", limit=1), 1.0)
    (refusal,) = only(Refuse, submit(made, 22, now=1.0, timeout_s=5.0))
    assert refusal.retry_after_s == 4.0, "one more has begun, and two begin in a second"


def test_a_query_whose_turn_comes_too_late_is_not_run() -> None:
    made = router(backend("r1", limit=1))
    (number,) = numbers(submit(made, 1))
    submit(made, 2, timeout_s=1.5)
    submit(made, 3, timeout_s=9.0)
    effects = made.answered("r1", [(number, 200)], 1.0)
    text = "no answer within 1.5 s: when its turn came 0.5 s were left, and a query takes about 1 s"
    assert refused(effects) == [(2, "QueryTimeoutError", text)]
    assert assigned(effects) == [("r1", 3)]
    assert statuses(effects) == [408]


def test_a_query_past_its_time_is_not_run_though_no_timer_has_fired() -> None:
    made = router(backend(limit=1))
    submit(made, 1, timeout_s=1.0)
    effects = made.set_backend("b", backend("r1", limit=1), 1.0)
    assert refused(effects) == [(1, "QueryTimeoutError", "no answer within 1 s")]
    assert made.is_empty


def test_a_backend_that_could_not_start_refuses_also_what_waits() -> None:
    made = router(backend())
    submit(made, 1)
    broken = backend(unavailable="it could not be started")
    text = "e is unavailable: it could not be started"
    effects = made.set_backend("b", broken, 1.0)
    assert refused(effects) == [(1, "DeploymentUnavailableError", text)]
    assert refused(submit(made, 2)) == [(2, "DeploymentUnavailableError", text)]
    assert made.is_empty


# --- Time limits and cancelling -----------------------------------------------------------------


def test_a_queued_query_past_its_time_is_dropped() -> None:
    made = router(backend())
    submit(made, 1, now=10.0, timeout_s=2.5)
    assert made.next_due_at() == 12.5
    assert made.expire(12.4) == []
    effects = made.expire(12.5)
    assert refused(effects) == [(1, "QueryTimeoutError", "no answer within 2.5 s")]
    assert effects[1:] == [Ended("e", "b", 408, 2.5)]
    assert made.is_empty


@pytest.mark.parametrize("http_method", ["GET", ""])
@pytest.mark.parametrize(
    ("asked", "own", "deadline"), [(5.0, 1.0, 1.0), (0.5, 1.0, 0.5), (None, 1.0, 1.0), (2, None, 2)]
)
def test_a_request_or_call_has_the_shorter_of_its_own_limit_and_the_backends(
    http_method: str, asked: float | None, own: float | None, deadline: float
) -> None:
    made = router(backend("r1", request_timeout_s=own))
    submit(made, 1, timeout_s=asked, http_method=http_method)
    assert made.next_due_at() == deadline


def test_a_cancelled_running_query_keeps_its_slot_until_its_outcome() -> None:
    made = router(backend("r1", limit=1))
    ticket = submit(made, 1)[0].ticket
    submit(made, 2)
    assert made.cancel("c", 1, 1.0) == [Cancel("r1", ticket.number)]
    assert made.cancel("c", 1, 1.0) == [], "once is enough"
    assert ongoing(made) == {"r1": 1}
    effects = made.finished("r1", [(ticket.number, 200)], 2.0)
    assert statuses(effects) == [499]
    assert assigned(effects) == [("r1", 2)]


def test_cancelled_queries_with_far_deadlines_leave_no_memory_taken() -> None:
    made = router(backend())

    def ask_and_cancel(times: int) -> None:
        for number in range(times):
            submit(made, number, timeout_s=3600.0)
            made.cancel("c", number, 0.0)

    ask_and_cancel(1_000)
    assert growth(lambda: ask_and_cancel(10_000)) < 100_000
    assert made.is_empty


# --- Replicas that die, reject and leave --------------------------------------------------------


def test_what_a_dead_replica_had_goes_to_another_where_it_may_be_retried() -> None:
    made = router(backend("r1", limit=9))
    submit(made, 1)
    submit(made, 2, retryable=False)
    made.set_backend("b", backend("r1", "r2", limit=9), 0.0)
    effects = made.replica_gone("r1", (), 1.0)
    text = "e: the replica died with this query under way; it may have run"
    refusal = Refuse("c", 2, "ReplicaUnavailableError", text, 1.0, died="r1")
    assert only(Refuse, effects) == [refusal]
    assert assigned(effects) == [("r2", 1)]
    assert made.replica_gone("r1", (), 1.0) == []


def test_a_query_kills_at_most_three_replicas() -> None:
    tags = [f"r{i}" for i in range(MAX_ATTEMPTS + 1)]
    made = router(backend(*tags, limit=1))
    for effect in submit(made, 2, 3):  # others have paid for retries
        made.finished(effect.replica, [(effect.ticket.number, 200)], 0.0)
    effects = submit(made, 1)
    for _ in range(MAX_ATTEMPTS):
        effects = made.replica_gone(effects[0].replica, (), 1.0)
    text = "e: 3 replicas died with this query under way"
    assert refused(effects) == [(1, "ReplicaUnavailableError", text)]
    assert made.is_empty


def test_a_rejected_query_goes_elsewhere_or_waits_a_moment() -> None:
    made = router(backend("r1", limit=3))
    first = submit(made, 1, 2)
    assert made.rejected("r1", numbers(first), 1.0, draining=False) == []
    assert submit(made, 3, now=1.001) == [], "r1 is left alone"
    assert made.expire(1.0 + SATURATED_S / 2) == []
    effects = made.expire(1.0 + SATURATED_S)
    assert assigned(effects) == [("r1", 1), ("r1", 2), ("r1", 3)]
    assert first[0].ticket.attempts == 1, "a rejected query did not run"


def test_a_saturated_replica_that_has_done_something_gets_more_at_once() -> None:
    made = router(backend("r1", limit=3))
    first = numbers(submit(made, 1, 2))
    made.rejected("r1", first[1:], 1.0, draining=False)
    assert assigned(made.finished("r1", [(first[0], 200)], 1.001)) == [("r1", 2)]


def test_a_retired_replica_is_forgotten_once_its_last_answer_is_delivered() -> None:
    made = router(backend("r1"))
    (number,) = numbers(submit(made, 1))
    made.answered("r1", [(number, 200)], 1.0)
    made.set_backend("b", backend("r2"), 2.0)
    assert set(ongoing(made)) == {"r1", "r2"}, "the answer may be lost yet"
    made.delivered("r1", [number])
    assert set(ongoing(made)) == {"r2"}


def test_another_process_under_the_same_tag_means_that_the_first_is_lost() -> None:
    made = router(backend("r1", limit=1))
    submit(made, 1, retryable=False)
    reborn = BackendTable(tag="b", replicas=(replica("r1", life=2),), max_ongoing_requests=1)
    effects = made.set_backend("b", reborn, 1.0)
    assert refused(effects)[0][:2] == (1, "ReplicaUnavailableError")
    assert assigned(submit(made, 2)) == [("r1", 2)]


# --- Answers on their way -----------------------------------------------------------------------


def test_an_answered_query_frees_its_slot_and_ends_when_its_answer_has_arrived() -> None:
    made = router(backend("r1", limit=1))
    (number,) = numbers(submit(made, 1, now=0.0))
    submit(made, 2)
    effects = made.answered("r1", [(number, 201)], 3.0)
    assert assigned(effects) == [("r1", 2)]
    assert statuses(effects) == []
    assert made.delivered("r1", [number]) == [Ended("e", "b", 201, 3.0)]
    assert made.delivered("r1", [number]) == []


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("retryable", [False, True])
def test_an_answer_that_did_not_reach_its_caller_is_made_again_or_a_refusal(
    answered: bool, retryable: bool
) -> None:
    made = router(backend("r1", limit=1))
    (number,) = numbers(submit(made, 1, retryable=retryable))
    submit(made, 2)
    if answered:
        effects = made.answered("r1", [(number, 200)], 1.0)
        made.finished("r1", [(numbers(effects)[0], 200)], 1.5)
    effects = made.undelivered("r1", [number, 99], 2.0)
    assert made.undelivered("nobody", [number], 2.0) == []
    again = [("r1", 1)] if retryable else []
    waited = [] if answered else [("r1", 2)]
    assert assigned(effects) == (waited or again)  # the slot is one
    assert statuses(effects) == ([] if retryable else [503])
    assert made.undelivered("r1", [number], 3.0) == [] or waited == []


def test_an_answer_of_which_a_part_has_left_is_not_made_again() -> None:
    made = router(backend("r1", "r2"))
    (number,) = numbers(submit(made, 1))
    made.begun("r1", [number, 99], 0.0)
    made.begun("nobody", [number], 0.0)
    effects = made.replica_gone("r1", (), 2.0)
    assert assigned(effects) == []
    assert statuses(effects) == [503]
    assert made.is_empty


def test_what_is_queued_at_a_removed_backend_that_still_has_traffic_fails() -> None:
    made = router(backend())
    submit(made, 1)
    effects = made.set_backend("b", None, 1.0)
    text = "endpoint 'e' has no backend with traffic"
    assert refused(effects) == [(1, "DeploymentUnavailableError", text)]


def test_what_waits_for_a_deleted_endpoint_is_refused() -> None:
    made = router(backend("r1", limit=1))
    first = numbers(submit(made, 1, 2))
    effects = made.set_endpoint("e", None, 1.0)
    assert refused(effects) == [(2, "DeploymentUnavailableError", "e was deleted")]
    assert statuses(made.finished("r1", [(first[0], 200)], 2.0)) == [200]
    assert made.is_empty
    assert made.set_endpoint("e", None, 1.0) == []


@pytest.mark.parametrize(
    ("path", "endpoint_name"),
    [
        ("/", "root"),
        ("/predictor", "root"),
        ("/predict", "predict"),
        ("/predict/", "predict"),
        ("/predict/x/y/z", "predict"),
        ("/predict/deep/er", "deeper"),
        ("/predict/deep/er/" + "x/" * 2000, "deeper"),
        ("/predict/deep/e", "predict"),
    ],
)
def test_the_longest_route_that_covers_the_path_counts(path: str, endpoint_name: str) -> None:
    made = router(backend("r1", limit=9))
    routes = {"root": "/", "predict": "/predict", "deeper": "/predict/deep/er"}
    for name, route in routes.items():
        made.set_endpoint(name, endpoint(name, route=route), 0.0)
    ticket = submit(made, 1, endpoint=None, path=path)[0].ticket
    assert (ticket.endpoint, ticket.route) == (endpoint_name, routes[endpoint_name])


def test_routes_follow_their_endpoints() -> None:
    made = router(backend("r1"))
    made.set_endpoint("e", endpoint(route="/old"), 0.0)
    made.set_endpoint("e", endpoint(route="/new"), 0.0)
    made.set_endpoint("f", endpoint("f", route="/old"), 0.0)
    assert made.state.routes.all() == {"/new": "e", "/old": "f"}
    made.set_endpoint("f", None, 0.0)
    assert made.state.routes.all() == {"/new": "e"}


def test_a_route_that_changes_hands_is_not_lost_to_the_one_that_had_it() -> None:
    made = router(backend("r1"))
    made.set_endpoint("e", endpoint(route="/a"), 0.0)
    made.set_endpoint("f", endpoint("f", route="/a"), 0.0)
    made.set_endpoint("e", endpoint(), 0.0)
    assert made.state.routes.all() == {"/a": "f"}


# --- Multiplexed models -------------------------------------------------------------------------


def test_a_query_for_a_model_goes_to_the_least_loaded_replica_that_has_it() -> None:
    made = router(backend("r1", "r2", "r3", limit=9))
    made.holds("r2", ("m", "n"))
    made.holds("r3", ("m",))
    effects = submit(made, 1, 2, 3, multiplexed_model_id="m")
    assert sorted(assigned(effects)) == [("r2", 1), ("r2", 3), ("r3", 2)]
    assert assigned(submit(made, 4, 5, multiplexed_model_id="n")) == [("r2", 4), ("r2", 5)]
    assert assigned(submit(made, 6)) == [("r1", 6)]


# --- Readiness ----------------------------------------------------------------------------------


def test_what_is_wanted_and_has_no_replica_is_lacking_and_whether_it_had_one() -> None:
    made = router(
        backend("r1", is_wanted=True, is_expected=True),
        backend(tag="new", is_wanted=True),
        backend(tag="idle"),
        backend(tag="shadow", is_wanted=True, is_expected=True),
    )
    made.set_endpoint("e", endpoint(shadows={"shadow": 1.0}), 0.0)
    for name in ("new", "idle"):
        made.set_endpoint(name, endpoint(name, to=name), 0.0)
    made.set_endpoint("lost", EndpointTable(name="lost", unavailable="damaged"), 0.0)
    assert lacking(made.state) == {"e": {}, "idle": {}, "lost": None, "new": {"new": ("", False)}}
    made.replica_gone("r1", [], 1.0)
    assert lacking(made.state)["e"] == {"b": ("", True)}
    assert unready(made.state) == {"e": ("b",), "lost": ()}
    made.set_backend("new", backend(tag="new", is_wanted=True, has_run=False, trouble="boom"), 1.0)
    assert lacking(made.state)["new"] == {"new": ("boom", False)}
    made.set_backend("b", backend(), 2.0)
    assert lacking(made.state)["e"] == {}, "it wants none"


def test_an_http_request_does_not_wait_for_what_has_never_run_and_a_call_of_a_handle_does() -> None:
    made = router(backend(is_wanted=True, has_run=False, trouble="a secret"))
    text = "e is unavailable: none of its replicas has run yet"
    refusal = Refuse("c", 1, "DeploymentUnavailableError", text, 5.0)
    assert only(Refuse, submit(made, 1, http_method="POST")) == [refusal]
    assert only(Refuse, submit(made, 2)) == []
    assert assigned(made.set_backend("b", backend("r1", is_wanted=True), 1.0)) == [("r1", 2)]
    assert assigned(submit(made, 3, http_method="GET")) == [("r1", 3)]


# --- Which replica answers ----------------------------------------------------------------------


def test_a_replica_that_does_not_answer_gets_one_of_many_queries() -> None:
    made = router(backend("r1", "r2", limit=100))
    got = []
    for number in range(100):
        (effect,) = submit(made, number)
        got.append(effect.replica)
        if effect.replica == "r2":
            made.cancel("c", number, 2.0)
        else:
            made.answered("r1", [(effect.ticket.number, 200)], 0.005)
    assert got.count("r2") == 1


def test_a_suspect_that_answers_in_time_is_one_of_all_again() -> None:
    made = router(backend("r1", "r2", limit=100))
    for effect in submit(made, 1, 2):
        made.answered(effect.replica, [(effect.ticket.number, 200)], 3.0)  # both took long
    only_r1 = submit(made, 3, now=4.0)
    made.answered("r1", [(numbers(only_r1)[0], 200)], 4.1)
    two_for_each_of_its = submit(made, 4, 5, 6, now=5.0)
    assert assigned(two_for_each_of_its) == [("r1", 4), ("r1", 5), ("r2", 6)]
    made.answered("r2", [(numbers(two_for_each_of_its)[2], 200)], 5.1)
    assert assigned(submit(made, 7, now=6.0)) == [("r2", 7)]


def test_a_suspect_is_taken_where_no_other_has_room() -> None:
    made = router(backend("r1", "r2", limit=1))
    first = submit(made, 1, 2)
    made.cancel("c", 2, 5.0)  # r2 has not said a word
    made.finished("r2", [(numbers(first)[1], 499)], 6.0)
    assert assigned(submit(made, 3, now=7.0)) == [("r2", 3)]


def test_a_replica_that_answers_others_meanwhile_is_not_suspect() -> None:
    """As with a query that takes long among quick ones."""
    made = router(backend("r1", "r2", limit=100))
    long = submit(made, 1)
    for second in range(1, 5):
        for effect in submit(made, 2 * second, 2 * second + 1, now=second - 0.5):
            made.answered(effect.replica, [(effect.ticket.number, 200)], float(second))
    made.answered("r1", [(numbers(long)[0], 200)], 4.5)
    assert {replica for replica, _ in assigned(submit(made, 100, 101, now=5.0))} == {"r1", "r2"}


# --- A host does not answer ---------------------------------------------------------------------


def on_two_hosts(limit: int = 2) -> WatchedRouter:
    replicas = (replica("r1", host="h1"), replica("r2", host="h2"))
    return router(BackendTable(tag="b", replicas=replicas, max_ongoing_requests=limit))


def test_a_silent_host_gets_nothing_new_and_others_get_what_may_be_retried() -> None:
    made = on_two_hosts(limit=3)
    submit(made, 1)
    submit(made, 2)
    submit(made, 3, retryable=False)  # at r1, as query 1
    effects = made.hosts.silent("h1", 1.0)
    (withdrawn,) = only(Cancel, effects)
    assert (withdrawn.replica, assigned(effects)) == ("r1", [("r2", 1)])
    assert withdrawn.number not in numbers(effects)
    assert only(Refuse, effects) == []
    assert only(Retried, effects) == [Retried("e", "b", "silent")]
    assert assigned(submit(made, 4, now=1.0)) == [("r2", 4)]
    assert submit(made, 5, now=1.0) == [], "r2 is full, and r1 gets none"
    assert made.hosts.silent("h1", 1.1) == []


def test_a_host_that_answers_again_is_used_as_far_as_it_has_room() -> None:
    made = on_two_hosts(limit=1)
    (first,) = numbers(submit(made, 1))
    made.hosts.silent("h1", 1.0)
    submit(made, 2, 3, now=1.0)
    assert made.hosts.answers("h1", 2.0) == [], "it may still run the first query"
    effects = made.finished("r1", [(first, 499)], 2.1)
    assert [replica for replica, _ in assigned(effects)] == ["r1"]


@pytest.mark.parametrize("says", ["answered", "rejected", "undelivered"])
def test_the_slot_of_a_query_that_moved_is_free_once_its_replica_has_said_anything(
    says: str,
) -> None:
    made = on_two_hosts(limit=1)
    (first,) = numbers(submit(made, 1))
    made.hosts.silent("h1", 1.0)
    made.hosts.answers("h1", 2.0)
    assert ongoing(made)["r1"] == 1
    if says == "answered":
        made.answered("r1", [(first, 200)], 2.1)
    elif says == "rejected":
        made.rejected("r1", [first], 2.1, draining=False)
    else:
        made.undelivered("r1", [first], 2.1)
    assert ongoing(made)["r1"] == 0


def test_what_a_silent_host_says_late_of_a_query_that_moved_counts_for_nothing() -> None:
    made = on_two_hosts()
    (first,) = numbers(submit(made, 1))
    (moved,) = numbers(made.hosts.silent("h1", 1.0))
    made.hosts.answers("h1", 2.0)
    assert made.answered("r1", [(first, 200)], 2.1) == []
    made.delivered("r1", [first])
    assert made.open_tickets == 1
    assert statuses(made.finished("r2", [(moved, 200)], 2.2)) == [200]
    assert made.is_empty


def test_all_waits_where_every_host_is_silent() -> None:
    made = on_two_hosts(limit=3)
    submit(made, 1, 2)
    made.hosts.silent("h1", 1.0)
    assert made.hosts.silent("h2", 1.0) == []
    assert submit(made, 3, now=1.0) == []
    assert busy(made.state) == {"b": (1, 2)}
    assert assigned(made.hosts.answers("h1", 2.0)) == [("r1", 3)]
    assert assigned(made.hosts.silent("h2", 2.1)) == [("r1", 2)], "one that is there takes the rest"
    assert made.hosts.silent("h2", 2.2) == []


def test_what_waits_at_a_silent_host_goes_to_a_replica_that_comes() -> None:
    made = router(BackendTable(tag="b", replicas=(replica("r1", host="h1"),)))
    submit(made, 1)
    assert made.hosts.silent("h1", 1.0) == []
    made.set_backend("b", BackendTable(tag="b", replicas=(replica("r2", host="h2"),)), 2.0)
    assert assigned(made.hosts.silent("h1", 2.1)) == [("r2", 1)], "r1 is in no table any more"
    assert only(RetryRefused, made.hosts.silent("h1", 2.2)) == []


def test_what_the_first_queries_have_at_a_host_that_is_lost_moves_too() -> None:
    made = on_two_hosts(limit=100)
    submit(made, 1, 2, 3)
    made.state.endpoints["e"].budgets["b"].tokens = 0  # others have used them up
    assert len(only(Cancel, made.hosts.silent("h1", 1.0))) == 2


def test_retries_of_deaths_do_not_pay_for_what_moved() -> None:
    hosts = {"r1": "h1", "r2": "h2", "r3": "h2"}
    replicas = tuple(replica(tag, host=host) for tag, host in hosts.items())
    made = router(BackendTable(tag="b", replicas=replicas, max_ongoing_requests=100))
    submit(made, *range(9))
    made.state.endpoints["e"].budgets["b"].tokens = 0  # others have used them up
    assert len(only(Cancel, made.hosts.silent("h1", 1.0))) == 3
    submit(made, 10, 11, now=1.0)
    effects = made.replica_gone("r2", (), 1.1)
    assert len(only(Retried, effects)) == 2, "one for each query since"
    assert only(RetryRefused, effects)


def test_no_text_is_made_for_what_stays_at_a_silent_host() -> None:
    """There may be thousands, and they are asked with each of its beats."""

    told: list[str] = []

    class Name(str):
        __slots__ = ()

        def __format__(self, spec: str) -> str:
            told.append(spec)
            return super().__format__(spec)

    made = on_two_hosts(limit=9)
    made.set_endpoint("e", endpoint(Name("e")), 0.0)
    submit(made, 1, 2, 3, retryable=False)
    assert made.hosts.silent("h1", 1.0) == made.hosts.silent("h1", 1.1) == []
    assert not told
    assert "it may have run" in refused(made.replica_gone("r1", (), 1.2))[0][2]
    assert told


def test_retries_from_a_silent_host_are_within_the_budget() -> None:
    made = on_two_hosts(limit=1000)
    submit(made, *range(1000))
    moved = len(only(Cancel, made.hosts.silent("h1", 1.0)))
    made.hosts.answers("h1", 2.0)
    for _ in range(10):
        for host in ("h2", "h1"):
            moved += len(only(Cancel, made.hosts.silent(host, 3.0)))
            made.hosts.answers(host, 3.0)
    assert 1000 < moved <= 1000 + SPARE
    assert made.open_tickets == 1000


def test_a_replica_that_comes_to_a_silent_host_gets_nothing() -> None:
    made = router(backend())
    made.hosts.silent("h1", 0.0)
    table = BackendTable(tag="b", replicas=(replica("r1", host="h1"),), max_ongoing_requests=1)
    submit(made, 1)
    assert assigned(made.set_backend("b", table, 1.0)) == []
    assert assigned(made.hosts.answers("h1", 2.0)) == [("r1", 1)]


def test_what_a_lost_host_has_is_abandoned_once_the_controller_has_replaced_its_replicas() -> None:
    """Its processes stand still, and their kernel keeps the connections."""
    made = on_two_hosts()
    submit(made, 1, retryable=False)
    made.hosts.silent("h1", 1.0)
    assert made.hosts.silent("h1", 4.0, for_long=True) == [], "the controller has not judged it"
    made.set_backend("b", BackendTable(tag="b", replicas=(replica("r2", host="h2"),)), 4.0)
    assert refused(made.hosts.silent("h1", 4.1, for_long=True))[0][:2] == (
        1,
        "ReplicaUnavailableError",
    )
    assert made.is_empty
    made.hosts.answers("h1", 5.0)
    assert made.answered("r1", [(1, 200)], 5.0) == []
