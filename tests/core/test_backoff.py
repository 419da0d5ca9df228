"""Pauses between tries grow, and stay what they are at their cap, for months."""

from greenroom.core.backoff import pause_s


def test_each_pause_is_twice_the_one_before_up_to_the_cap() -> None:
    assert [pause_s(count, 0.1, 1.0) for count in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_what_has_never_failed_waits_as_after_the_first_failure() -> None:
    assert pause_s(0, 0.1, 1.0) == 0.1


def test_a_pause_is_the_cap_after_any_number_of_failures() -> None:
    for failures in (1_024, 1_025, 1_026, 10**6, 10**12):
        assert pause_s(failures, 0.02, 10.0) == 10.0
