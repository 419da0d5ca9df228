"""The tables of settings and options say what the models say."""

from __future__ import annotations

import re
from pathlib import Path

from greenroom.actors.runtime.settings import FIELDS, described
from greenroom.core.config import BackendConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "commands.md"


def test_the_table_of_settings_is_that_of_the_model():
    rows = [
        f"| `--{name.replace('_', '-')}` | {described(field)} |" for name, field in FIELDS.items()
    ]
    table = "\n".join(["| setting | meaning [default] |", "|---|---|", *rows, ""])
    assert table in PAGE.read_text(), f"the table in {PAGE} should be:\n{table}"


def test_the_table_of_options_has_all_those_of_a_deployment():
    table = (DOCS / "deployments.md").read_text().partition("\n\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    beside = {"name", "version", "actor_options", "ray_actor_options"}
    assert named == {*BackendConfig.model_fields, *beside}
