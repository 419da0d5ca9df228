"""What is to be looked at: when touched, when due, or upon an event, and each time once."""

from __future__ import annotations

from greenroom.core.agenda import NEVER, Agenda


def test_what_is_touched_is_reconciled_once_and_kinds_in_their_order() -> None:
    agenda = Agenda()
    assert agenda.next_at() == NEVER
    agenda.touch("goal", "g")
    agenda.touch("backend", "b", "a")
    agenda.touch("backend", "a")
    agenda.touch("application")
    assert agenda.next_at() == float("-inf")
    assert agenda.first(("backend", "application", "goal"), 0.0) == "backend"
    assert agenda.take("backend", 0.0) == ["a", "b"]
    assert agenda.first(("backend", "application", "goal"), 0.0) == "goal"
    assert agenda.take("goal", 0.0) == ["g"]
    assert agenda.first(("backend", "application", "goal"), 0.0) == ""


def test_a_key_is_due_at_the_time_that_was_set_last() -> None:
    agenda = Agenda()
    for due_at in (5.0, 3.0, 7.0):
        agenda.at("backend", "b", due_at)
    agenda.by("backend", "b", 9.0)
    assert agenda.next_at() == 7.0
    agenda.by("backend", "b", 6.0)
    assert agenda.take("backend", 5.9) == []
    assert agenda.take("backend", 6.0) == ["b"]
    agenda.at("backend", "b", 8.0)
    agenda.at("backend", "b", NEVER)
    assert agenda.next_at() == NEVER
    assert agenda.take("backend", 100.0) == []


def test_an_event_is_waited_for_once() -> None:
    agenda = Agenda()
    agenda.upon("held", "goal", "g")
    agenda.upon("held", "goal", "h")
    agenda.upon(("backend", "b"), "goal", "g")
    agenda.happened("held")
    assert agenda.take("goal", 0.0) == ["g", "h"]
    agenda.happened("held")
    assert agenda.take("goal", 0.0) == []
    agenda.happened(("backend", "b"))
    assert agenda.take("goal", 0.0) == ["g"]


def test_what_is_dropped_is_neither_due_nor_waited_for() -> None:
    agenda = Agenda()
    agenda.upon("held", "request", "r")
    agenda.upon("held", "request", "s")
    agenda.at("request", "r", 5.0)
    agenda.drop("request", "r", "held")
    agenda.drop("request", "unknown", "unknown")
    agenda.happened("held")
    assert agenda.take("request", 10.0) == ["s"]
    assert agenda.next_at() == NEVER
