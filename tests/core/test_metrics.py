"""Metrics of a process, their bounds, and Prometheus' text, read by its own parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.core.metrics import Family, Registry, bounds_problem, name_problem, text


def samples(shown: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return (name, labels) -> value, as Prometheus' parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(shown.decode())
        for sample in family.samples
    }


def test_counters_gauges_and_histograms_are_read_as_they_were_counted() -> None:
    registry = Registry()
    ended = registry.counter("ended_total", "All that ended", "status")
    level = registry.gauge("level", "")
    seconds = registry.histogram("seconds", "Time", bounds=(0.1, 1.0))
    for status in ("200", "200", "500"):
        ended.add(1, status)
    level.set(-2.5)
    seconds.observe(0.1)
    seconds.observe_all([0.5, 30])
    seconds.observe_all([])
    found = samples(text([({}, registry.families())]))
    assert found["ended_total", (("status", "200"),)] == 2
    assert found["level", ()] == -2.5
    buckets = [found["seconds_bucket", (("le", le),)] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert (found["seconds_sum", ()], found["seconds_count", ()]) == (pytest.approx(30.6), 3)


def test_any_text_in_labels_and_descriptions_comes_back_as_it_was() -> None:
    odd = 'a "quoted"\\n\nback\\slash, {brace} ünï'
    registry = Registry()
    registry.gauge("odd", odd, "what").set(1, odd)
    shown = text([({"host": odd}, registry.families())])
    assert list(samples(shown)) == [("odd", (("host", odd), ("what", odd)))]
    (family,) = text_string_to_metric_families(shown.decode())
    assert family.documentation == odd


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e300, 0.1, 3])
def test_numbers_come_back_as_they_were(value: float) -> None:
    registry = Registry()
    registry.gauge("value", "").set(value)
    assert samples(text([({}, registry.families())])) == {("value", ()): value}


def test_families_of_several_processes_are_joined_by_name() -> None:
    registries = [Registry(), Registry()]
    for registry in registries:
        registry.counter("ended_total", "All").add(1)
    groups = [({"pid": str(n)}, each.families()) for n, each in enumerate(registries)]
    shown = text(groups).decode()
    assert shown.count("# TYPE ended_total") == 1
    assert len(samples(shown.encode())) == 2


def test_a_name_that_has_another_kind_elsewhere_is_left_out_and_said() -> None:
    counters, gauges = Registry(), Registry()
    counters.counter("mine", "").add(1)
    gauges.gauge("mine", "").set(7)
    shown = text([({}, counters.families()), ({"replica": "b\nx 1"}, gauges.families())])
    assert list(samples(shown).values()) == [1]
    assert b"# left out: a gauge of this name (replica b" in shown


def test_new_labels_are_dropped_where_there_is_no_room_and_known_ones_go_on() -> None:
    found: list[str] = []
    registry = Registry(2, found.append)
    ended = registry.counter("ended_total", "", "who")
    for who in ("a", "b", "c", "d", "a"):
        ended.add(1, who)
    assert ended.family().samples == {("a",): 2, ("b",): 1}
    assert (registry.dropped, found) == (2, ["ended_total"]), "told once"


def test_a_metric_is_made_once_and_cannot_be_two_things() -> None:
    registry = Registry()
    seconds = registry.histogram("seconds", "", "who", bounds=(1.0,))
    assert registry.histogram("seconds", "", "who", bounds=(1.0,)) is seconds
    with pytest.raises(ValueError, match="name='seconds': there is a histogram with who and"):
        registry.histogram("seconds", "", "whom", bounds=(1.0,))
    with pytest.raises(ValueError, match="name='seconds_count': the lines of this gauge"):
        registry.gauge("seconds_count", "")


def test_what_is_gone_is_forgotten() -> None:
    registry = Registry()
    ended = registry.counter("ended_total", "", "endpoint", "backend")
    ended.add(1, "shop", "v1")
    ended.add(1, "shop", "v2")
    registry.gauge("level", "").set(1)
    registry.forget("backend", "v1")
    assert ended.family().samples == {("shop", "v2"): 1}
    assert len(registry.families()) == 2


@pytest.mark.parametrize("name", ["", "9lives", "a-b", "a b", "ünï", "x" * 201, "greenroom_x"])
def test_bad_names_are_named(name: str) -> None:
    assert name_problem(name)
    assert not name_problem("model:rows_2")


@pytest.mark.parametrize("bounds", [[], [2, 1], [1, 1], [math.inf], ["1"], list(range(101))])
def test_bad_boundaries_are_named(bounds: list[float]) -> None:
    assert bounds_problem(bounds)
    assert not bounds_problem([0.5, 1])


def test_nothing_counted_is_nothing_written() -> None:
    empty = Family("nothing", "gauge", "", (), (), {})
    assert samples(text([({}, [empty])])) == {}
