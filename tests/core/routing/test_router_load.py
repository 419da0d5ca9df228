from tests.core.routing.queries import Query, Starved, backend, numbers, only, router


def test_only_backends_with_queries_are_busy() -> None:
    made = router(backend("r1", limit=1), backend("r2", tag="idle"))
    assert made.busy() == {}
    first = numbers([e for i in (1, 2, 3) for e in made.submit("c", Query(i), 0.0)])
    made.submit("another", Query(1), 0.0)
    assert made.busy() == {"b": (3, 1)}
    made.finished("r1", [(first[0], 200)], 1.0)
    assert made.busy() == {"b": (2, 1)}


def test_what_a_replica_of_an_older_table_runs_is_load_of_its_backend() -> None:
    made = router(backend("r1", limit=1))
    made.submit("c", Query(1), 0.0)
    made.set_backend("b", backend("r2", limit=1), 1.0)
    made.cancel("c", 1, 1.0)
    assert made.busy() == {"b": (0, 1)}, "its slot is taken until its outcome comes"


def test_the_first_query_that_waits_where_no_replica_is_says_so_once() -> None:
    made = router(backend())
    effects = [e for i in (1, 2, 3) for e in made.submit("c", Query(i), 0.0)]
    assert only(Starved, effects) == [Starved("b")]


def test_a_full_replica_starves_nobody() -> None:
    made = router(backend("r1", limit=1))
    effects = [e for i in (1, 2) for e in made.submit("c", Query(i), 0.0)]
    assert only(Starved, effects) == []
