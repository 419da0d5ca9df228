"""What a scrape of a running system has, read by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.systems import RunningSystem, wait_until


def scraped(running: RunningSystem, query: str = "") -> dict[str, Metric]:
    """Return all metrics by their names; a counter's is without ``_total``."""
    text = scraped_text(running, query)
    return {family.name: family for family in text_string_to_metric_families(text)}


def scraped_text(running: RunningSystem, query: str = "") -> str:
    """Return the text of a scrape, which may be a second old."""
    return running.get(f"/-/metrics{query}")[1].decode()


def scraped_anew(running: RunningSystem) -> str:
    """Return the text of a scrape that has begun after this call."""
    kept = scraped_text(running)  # no two are alike: they have the CPU time of processes

    def other() -> str | None:
        text = scraped_text(running)
        return None if text == kept else text

    return wait_until(other, 10, "another scrape")


def total(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """Return the sum of the samples of this name that have the labels; 0 without any."""
    wanted = labels.items()
    return sum(
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == sample and wanted <= each.labels.items()
    )


def ongoing(running: RunningSystem, name: str, *, anew: bool = False) -> float | None:
    """Return how many slots the application's queries have; None while no scrape has it."""
    text = scraped_anew(running) if anew else scraped_text(running)
    found = [
        line
        for line in text.splitlines()
        if line.startswith("greenroom_ongoing_") and f'"{name}#' in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in found) if found else None
