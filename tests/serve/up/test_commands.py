"""`greenroom up` and `down` refuse bad input before they go anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from greenroom.serve.cli.main import main

HOSTS = "wheels: wheels\nhosts: {one: {address: 10.0.0.1}, two: {address: 10.0.0.2}}\n"


@pytest.fixture(name="file")
def write_file(tmp_path: Path) -> str:
    path = tmp_path / "hosts.yaml"
    path.write_text(HOSTS)
    return str(path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["up", "FILE"], "Error: wheels: there is no folder"),
        (["up", "no.yaml"], "File 'no.yaml' does not exist"),
        (["up", "FILE", "--timeout", "0"], "0.0 is not in the range x>0"),
        (["down", "FILE", "--delete"], "all that one, two have is deleted.*Give --yes to do so"),
    ],
    ids=["no wheels", "no file", "no time", "a question that nobody can answer"],
)
def test_bad_use_is_reported_with_exit_code_2(file: str, args: list[str], message: str) -> None:
    done = CliRunner().invoke(main, [file if arg == "FILE" else arg for arg in args])
    assert done.exit_code == 2, done.output
    assert re.search(message, " ".join(done.output.split())), done.output
