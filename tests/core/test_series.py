"""Time series: what is counted in which step, what is kept for how long, and what is dropped."""

from __future__ import annotations

import pytest

from greenroom.core import operations as ops
from greenroom.core.errors import UnknownNameError
from greenroom.core.series import Pair, PlainTraffic, Series, Traffic
from tests.core.requests import create, deploy, do, endpoint
from tests.core.worlds import Spec, World

SHOP: Pair = ("shop", "shop:v1")
CAFE: Pair = ("cafe", "cafe:v1")
NOON = 1_700_000_000  # a multiple of ten


def traffic(*outcomes: tuple[int, float], queued: int = 0, ongoing: int = 0) -> PlainTraffic:
    counted = Traffic(queued=queued, ongoing=ongoing)
    for status, seconds in outcomes:
        counted.count(status, (seconds,))
    return counted.plain()


@pytest.fixture
def series() -> Series:
    made = Series(lambda pair: pair in {SHOP, CAFE})
    made.advance(NOON - 100)
    return made


def test_a_report_counts_for_the_second_before_it(series: Series) -> None:
    series.reported({SHOP: traffic((200, 0.01))}, NOON + 1.01)
    series.reported({SHOP: traffic((200, 0.01), (200, 0.01))}, NOON + 2.01)
    shown = series.shown("live", 3, [], NOON + 3.6)
    assert shown["step_s"] == 1
    assert shown["times"] == [NOON, NOON + 1, NOON + 2]
    assert shown["deployments"][SHOP]["requests_per_s"] == [1, 2, 0]


def test_reports_of_several_proxies_add_up(series: Series) -> None:
    series.reported({SHOP: traffic((200, 0.01), queued=2, ongoing=5)}, NOON + 1.01)
    series.reported({SHOP: traffic((404, 0.01), (500, 0.01), ongoing=1)}, NOON + 1.02)
    columns = series.shown("live", 1, [], NOON + 1.6)["deployments"][SHOP]
    assert columns["requests_per_s"] == [3]
    assert columns["errors_4xx_per_s"] == columns["errors_5xx_per_s"] == [1]
    assert (columns["queued"], columns["ongoing"]) == ([2], [6])


def test_percentiles_are_at_most_a_tenth_above(series: Series) -> None:
    slow = [(200, 0.4)] * 3
    series.reported({SHOP: traffic(*[(200, 0.02)] * 97, *slow)}, NOON + 1.01)
    columns = series.shown("live", 2, [], NOON + 2.6)["deployments"][SHOP]
    assert columns["p50_s"] == [pytest.approx(0.02, rel=0.1), None]
    assert columns["p99_s"] == [pytest.approx(0.4, rel=0.1), None]


def test_the_hour_has_means_of_ten_seconds(series: Series) -> None:
    for second in range(1, 11):
        series.reported({SHOP: traffic((200, 0.01), (200, 0.01), ongoing=4)}, NOON + second + 0.01)
    shown = series.shown("hour", 1, [], NOON + 10.6)
    columns = shown["deployments"][SHOP]
    assert shown["times"] == [NOON]
    assert (columns["requests_per_s"], columns["ongoing"]) == ([2], [4])


def test_the_cluster_is_the_sum_of_all_deployments(series: Series) -> None:
    reports = {SHOP: traffic((200, 0.01)), CAFE: traffic((503, 0.01), queued=1)}
    series.reported(reports, NOON + 1.01)
    cluster = series.shown("live", 1, [], NOON + 1.6)["cluster"]
    assert (cluster["requests_per_s"], cluster["queued"]) == ([2], [1])
    assert cluster["errors_5xx_per_s"] == [1]


def test_replicas_are_those_at_the_end_of_a_step(series: Series) -> None:
    for at, running in ((0.2, 1), (0.9, 2), (2.1, 1)):
        series.scaled("shop:v1", running, NOON + at)
        series.scaled("cafe:v1", 1, NOON + at)
    shown = series.shown("live", 3, [SHOP], NOON + 3.6)
    assert shown["deployments"][SHOP]["replicas"] == [2, 2, 1]
    assert shown["cluster"]["replicas"] == [3, 3, 2]
    series.removed("cafe:v1")
    assert series.shown("live", 3, [SHOP], NOON + 3.6)["cluster"]["replicas"] == [2, 2, 1]


def test_an_hour_is_kept_and_no_more(series: Series) -> None:
    for second in range(0, 4010, 5):
        series.reported({SHOP: traffic((200, 0.01))}, NOON + second + 0.01)
    shown = series.shown("hour", None, [], NOON + 4000.6)
    assert len(shown["times"]) == len(shown["cluster"]["p50_s"]) == 360
    assert set(shown["deployments"][SHOP]["requests_per_s"]) == {0.2}
    assert len(series.shown("live", None, [], NOON + 4000.6)["times"]) == 120


def test_a_pair_without_traffic_for_an_hour_is_dropped(series: Series) -> None:
    series.reported({SHOP: traffic((200, 0.01))}, NOON + 1.01)
    assert set(series.shown("hour", None, [], NOON + 3000)["deployments"]) == {SHOP}
    assert set(series.shown("hour", None, [], NOON + 4000)["deployments"]) == set()


def test_what_is_gone_is_dropped_and_not_taken_again() -> None:
    known = {SHOP, CAFE}
    series = Series(lambda pair: pair in known)
    series.reported({SHOP: traffic((200, 0.01)), CAFE: traffic((200, 0.01))}, NOON + 0.01)
    known.discard(SHOP)
    series.reported({SHOP: traffic((200, 0.01))}, NOON + 1.01)
    assert set(series.shown("live", None, [], NOON + 2)["deployments"]) == {CAFE}
    series.advance(NOON + 11)
    known.add(SHOP)
    assert set(series.shown("hour", None, [], NOON + 12)["deployments"]) == {CAFE}, "begins anew"


def test_a_clock_that_is_set_back_begins_anew(series: Series) -> None:
    series.reported({SHOP: traffic((200, 0.01))}, NOON + 1.01)
    series.reported({SHOP: traffic((200, 0.01))}, NOON - 1800 + 1.01)
    shown = series.shown("live", 2, [], NOON - 1800 + 2.6)
    assert shown["times"] == [NOON - 1800, NOON - 1799]
    assert shown["deployments"][SHOP]["requests_per_s"] == [1, 0]


def test_the_cluster_counts_what_clients_ask_and_no_calls_between_deployments() -> None:
    world = World()
    world.request(deploy("app", Spec("inner", b"1", {}), Spec("ingress", b"2", {})))
    world.request(create("shop:v1"))
    world.request(endpoint("shop", "shop:v1"))
    counted = traffic((200, 0.01))
    reports = {
        (name, tag): counted
        for tag in world.cluster.state.backends
        for name in [tag.partition(":")[0]]
    }
    world.cluster.series.reported(reports, NOON + 1.01)
    shown = world.cluster.series.shown("live", 1, [], NOON + 1.6)
    assert len(shown["deployments"]) == 3
    assert shown["cluster"]["requests_per_s"] == [2]


def test_the_operation_names_deployments_and_refuses_unknown_endpoints() -> None:
    world = World()
    world.request(create("shop:v1"))
    world.request(endpoint("shop", "shop:v1"))
    cluster = world.cluster
    cluster.series.reported({SHOP: traffic((200, 0.01))}, NOON + 1.01)
    (shown,) = do(ops.GetSeries, endpoint="shop")(cluster)["deployments"]
    assert (shown["endpoint"], shown["backend"], shown["application"]) == ("shop", "shop:v1", "")
    with pytest.raises(UnknownNameError, match="'cafe'"):
        do(ops.GetSeries, endpoint="cafe")(cluster)
