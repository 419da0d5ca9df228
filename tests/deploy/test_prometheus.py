"""deploy/prometheus, deploy/grafana: Prometheus takes them, and they name what there is."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.container import ROOT
from tests.support.programs import needed
from tests.support.systems import free_port, running_system, wait_until

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "greenroom.json").read_text())
PAGE = ROOT / "docs" / "monitoring.md"
VARIABLES = {"$__rate_interval": "5m", "$job": "greenroom"}


def _promtool(*args: str, folder: Path) -> str:
    promtool = needed("promtool", "prometheus")
    done = subprocess.run(
        [promtool, *args], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def _panels() -> list[dict[str, Any]]:
    return [each for each in DASHBOARD["panels"] if each["type"] != "row"]


def dashboard_queries() -> list[str]:
    """Return the dashboard's queries, for all hosts and endpoints."""
    found = [target["expr"] for panel in _panels() for target in panel["targets"]]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return [re.sub(r"\$\w+", ".*", query) for query in found]


SHOP = """
from greenroom import serve

@serve.deployment
class Shop:
    @serve.batch(max_batch_size=4)
    async def price(self, ids):
        return [8.0 for _ in ids]

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, name):
        return name

    async def __call__(self, request):
        await self.model("books")
        if request.query_params.get("id") == "none":
            raise LookupError("no such thing")
        return await self.price(1)

app = Shop.bind()
"""
# What has no samples where nothing is retried, mirrored, ejected or replaced.
QUIET = ("retries", "shadow", "ejections", "restarts")


class Prometheus:
    """A Prometheus server that scrapes one system as docs/monitoring.md says."""

    def __init__(self, folder: Path, target: str) -> None:
        (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        config = yaml.safe_load(block)
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._port = free_port()
        program = needed("prometheus")
        self._output = (folder / "output").open("wb")
        self._process = subprocess.Popen(
            [
                *(program, f"--config.file={folder}/prometheus.yml"),
                *(
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ),
            ],
            stdout=self._output,
            stderr=self._output,
        )

    def ask(self, path: str, **query: str) -> Any:
        """Return what its API answers; an OSError before it is up."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def has(self, query: str) -> bool:
        """Return whether a query finds anything now."""
        with contextlib.suppress(urllib.error.URLError):
            return bool(self.ask("query", query=query)["result"])
        return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._output.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "shop.py").write_text(SHOP)
    with running_system(folder / "state") as system:
        done = system.greenroom("deploy", "shop:app", "--app-dir", str(folder))
        assert done.returncode == 0, done.stderr
        server = Prometheus(folder, system.url.removeprefix("http://"))
        try:
            wait_until(lambda: server.has('up{job="greenroom"} == 1'), 15, "a scrape")

            def is_counted() -> bool:
                statuses = {system.get(path)[0] for path in ("/", "/?id=none")}
                assert statuses == {200, 500}
                return server.has('increase(greenroom_requests_total{status="500"}[5m]) > 1')

            wait_until(is_counted, 15, "requests between two scrapes")
            yield server
        finally:
            server.stop()


@pytest.mark.slow
def test_a_real_prometheus_answers_what_the_dashboard_asks(prometheus):
    for query in dashboard_queries():
        if any(word in query for word in QUIET):
            prometheus.ask("query", query=query)
        else:
            wait_until(lambda query=query: prometheus.has(query), 5, query)


@pytest.mark.slow
def test_a_real_prometheus_evaluates_the_alerts(prometheus):
    def states() -> dict[str, str]:
        groups = prometheus.ask("rules")["groups"]
        return {each["name"]: each["health"] for group in groups for each in group["rules"]}

    wanted = dict.fromkeys((rule["alert"] for rule in _rules()), "ok")
    wait_until(lambda: states() == wanted, 10, "all alerts evaluated")
    firing = {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]}
    assert firing <= {"GreenroomErrors"}  # pending, as half of the requests failed


def _metrics(query: str) -> Iterator[str]:
    yield from re.findall(r"\bgreenroom_\w+", re.sub(r'"[^"]*"', "", query))


def test_the_alerts_are_valid_and_fire_when_they_should():
    _promtool("check", "rules", RULES.name, folder=RULES.parent)
    _promtool("test", "rules", "tests.yml", folder=RULES.parent)


def test_each_alert_has_a_test_and_a_text():
    tests = yaml.safe_load((RULES.parent / "tests.yml").read_text())["tests"]
    fired = {
        each["alertname"] for one in tests for each in one["alert_rule_test"] if each["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in _rules()}
    assert all(rule["annotations"]["summary"] for rule in _rules())


def test_prometheus_parses_what_the_dashboard_asks(tmp_path):
    rules = [{"record": f"q{n}", "expr": query} for n, query in enumerate(dashboard_queries())]
    text = yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]})
    (tmp_path / "queries.yml").write_text(text)
    _promtool("check", "rules", "queries.yml", folder=tmp_path)


def test_alerts_and_dashboard_name_only_metrics_that_there_are():
    queries = [*dashboard_queries(), *(rule["expr"] for rule in _rules())]
    named = {name for query in queries for name in _metrics(query)}
    # A test of its own says that this table has what a running system exposes.
    table = re.findall(r"^\| `(greenroom_\w+)`", PAGE.read_text(), re.MULTILINE)
    there = {f"{name}{end}" for name in table for end in ("", "_bucket", "_sum", "_count")}
    assert named <= there


def test_the_panels_of_the_dashboard_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_each_variable_that_the_dashboard_uses_is_made():
    made = {each["name"] for each in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= made
