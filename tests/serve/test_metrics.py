"""serve.metrics: Ray Serve's signatures, tags and errors, in one process."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

from greenroom import serve
from greenroom.actors.replica import metrics as of_replica
from greenroom.serve import metrics
from tests.support.programs import python

_numbers = itertools.count(1)


@pytest.fixture
def name():
    """A name that no other metric has, in this process."""
    return f"test_metric_{next(_numbers)}"


def lines(name: str) -> dict[str, float]:
    """Return what this process has of a metric: its line without the name, and the value."""
    return {
        line.split("{")[1].rpartition("}")[0]: float(line.rpartition(" ")[2])
        for line in metrics.text().splitlines()
        if line.startswith(f"{name}{{")
    }


NOWHERE = 'deployment="",replica="",application=""'  # outside of any replica


def test_a_counter_adds_up_by_its_tags(name):
    counter = metrics.Counter(name, description="Rows", tag_keys=("kind",))
    counter.inc(tags={"kind": "text"})
    counter.set_default_tags({"kind": "image"})
    counter.inc(2.5)
    counter.inc(tags={"kind": "text"})
    assert lines(f"{name}_total") == {
        f'kind="text",{NOWHERE}': 2,
        f'kind="image",{NOWHERE}': 2.5,
    }
    assert counter.info["default_tags"] == {"kind": "image"}


def test_a_gauge_is_what_was_set_last(name):
    gauge = serve.metrics.Gauge(name)
    gauge.set(3)
    gauge.set(-1.5)
    assert lines(name) == {NOWHERE: -1.5}


def test_a_histogram_counts_by_boundaries(name):
    histogram = metrics.Histogram(name, boundaries=[1, 10])
    for value in (0.5, 5, 50):
        histogram.observe(value)
    assert list(lines(f"{name}_bucket").values()) == [1, 2, 3]
    assert lines(f"{name}_sum") == {NOWHERE: 55.5}
    metrics.Histogram(f"{name}_s", "Seconds").observe(0.004)
    assert f'{NOWHERE},le="0.005"' in lines(f"{name}_s_bucket")


def test_the_same_metric_made_again_goes_on(name):
    metrics.Counter(name).inc()
    metrics.Counter(name).inc()
    assert lines(f"{name}_total") == {NOWHERE: 2}
    metrics.Counter(f"{name}_total").inc()
    assert lines(f"{name}_total") == {NOWHERE: 3}, "the ending is not added twice"


def test_metrics_go_with_the_code_that_uses_them(name):
    counter = metrics.Counter(name, tag_keys=("kind",))
    counter.set_default_tags({"kind": "text"})
    histogram = metrics.Histogram(f"{name}_s", boundaries=[2])
    for dumps in (pickle.dumps, cloudpickle.dumps):
        pickle.loads(dumps(counter)).inc()
    pickle.loads(pickle.dumps(histogram)).observe(1)
    assert lines(f"{name}_total") == {f'kind="text",{NOWHERE}': 2}
    assert lines(f"{name}_s_count") == {NOWHERE: 1}


def test_no_count_is_lost_between_threads(name):
    counter = metrics.Counter(name)

    def count(_number: int) -> None:
        for _ in range(2_000):
            counter.inc()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert lines(f"{name}_total") == {NOWHERE: 8_000}


def test_bad_observations_are_errors_and_count_nothing(name):
    counter = metrics.Counter(name, tag_keys=("kind",))
    histogram = metrics.Histogram(f"{name}_s", boundaries=[1])
    with pytest.raises(ValueError, match="tag 'kind' has no value"):
        counter.inc()
    with pytest.raises(ValueError, match="has no tag 'size'; its tag_keys are: kind"):
        counter.inc(tags={"kind": "a", "size": "b"})
    with pytest.raises(TypeError, match="the value of 'kind' must be a string"):
        counter.inc(tags={"kind": 3})  # type: ignore[dict-item]
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite numbers above 0"):
            counter.inc(value, tags={"kind": "a"})
    with pytest.raises(TypeError, match="value='1': must be a number"):
        counter.inc("1", tags={"kind": "a"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="value=nan"):
        histogram.observe(float("nan"))
    with pytest.raises(ValueError, match=f"name='{name}_total': there is a counter with kind"):
        metrics.Counter(name, tag_keys=("other",))
    assert lines(f"{name}_total") == lines(f"{name}_s_count") == {}


def test_series_beyond_the_bound_are_dropped_with_one_warning(name, caplog, monkeypatch):
    from greenroom.core.metrics import Registry  # noqa: PLC0415

    of_users = Registry(10, of_replica.warn_full)
    monkeypatch.setattr(of_replica, "of_users", of_users)
    counter = metrics.Counter(name, tag_keys=("user",))
    for number in range(30):
        counter.inc(tags={"user": str(number)})
    assert len(lines(f"{name}_total")) == 10
    assert of_users.dropped == 20
    (record,) = caplog.records
    assert f"metric '{name}_total' has too many values of its tags" in record.getMessage()


@serve.deployment
class Counting:
    def __init__(self, name: str) -> None:
        self.calls = metrics.Counter(name, tag_keys=("route",))

    def __call__(self) -> None:
        self.calls.inc()


@pytest.fixture
def local():
    yield
    serve.shutdown()


@pytest.mark.usefixtures("local")
def test_in_local_testing_mode_all_is_counted_and_can_be_read(name):
    handle = serve.run(Counting.bind(name), name="local", _local_testing_mode=True)
    handle.remote().result()
    added = 'deployment="Counting",replica="local#Counting#local",application="local"'
    assert lines(f"{name}_total") == {f'route="",{added}': 1}


def test_what_counting_leads_to_may_count_as_a_handler_of_logs_or_a_finalizer_does(name):
    program = f"""
import logging
from greenroom.serve import metrics
rows = metrics.Counter({name!r}, tag_keys=("n",))
class Counting(logging.Handler):
    def emit(self, record):
        rows.inc(tags={{"n": "0"}})
        rows.inc(tags={{"n": "one more"}})
logging.getLogger().addHandler(Counting())
for number in range(1_100):  # some of which are dropped, and a warning says so
    rows.inc(tags={{"n": str(number)}})
assert 'n="0",deployment="",replica="",application=""}} 2' in metrics.text(), metrics.text()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


FORK_WHILE_ANOTHER_THREAD_COUNTS = """
import os, signal, threading
from greenroom.actors.replica import metrics as of_replica
from greenroom.serve import metrics

counter, counts, forks = metrics.Counter("rows"), threading.Event(), threading.Event()

def count():
    with of_replica.lock:
        counts.set()
        forks.wait(0.2)

threading.Thread(target=count).start()
counts.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    counter.inc()
    os._exit(0)
forks.set()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_child_that_is_forked_while_another_thread_counts_can_count():
    assert python("-W", "ignore", "-c", FORK_WHILE_ANOTHER_THREAD_COUNTS) == "0"
