"""The table of settings in docs/commands.md says what the model says."""

from __future__ import annotations

from pathlib import Path

from greenroom.actors.runtime.settings import FIELDS, described

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_table_of_settings_is_that_of_the_model() -> None:
    rows = [f"| `--{name.replace('_', '-')}` | {described(name)} |" for name in FIELDS]
    table = "\n".join(["| setting | meaning [default] |", "|---|---|", *rows, ""])
    assert table in PAGE.read_text(), f"the table in {PAGE} should be:\n{table}"
