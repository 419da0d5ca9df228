"""The code in the documentation runs as it stands.

A page's ``python`` blocks are one script, run in a fresh folder; its ``bash`` blocks are another,
run after it. A python block that begins with ``# NAME.py`` is that file, for the blocks after it.
Port 8000 is replaced by a free one. ``text`` blocks are skipped. Of ``console`` blocks, which need
several hosts, and of indented ones the commands and their flags must exist.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from greenroom.serve.cli.main import main
from tests.support.systems import PATIENCE, RunningSystem

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")
LANGUAGES = {"python", "bash", "console", "text", "json", "toml", "yaml", "ini", "nginx"}
TIMEOUT_S = 30 * PATIENCE
READ_FIRST = {"README.md", "tutorial.md"}


def blocks(page: Path, language: str) -> list[str]:
    return [code for each, code in BLOCK.findall(page.read_text()) if each == language]


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(blocks(page, each) for each in languages)]


def run(command: list[str], system: RunningSystem, folder: Path) -> None:
    """Run a page's script; what it prints is in the failure."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryFile("w+") as output:  # what it leaves running would hold a pipe open
        ended = subprocess.run(
            command,
            env={**os.environ, **system.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
            check=False,
        )
        output.seek(0)
        assert ended.returncode == 0, output.read()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=() if page.name in READ_FIRST else pytest.mark.slow)
        for page in pages_with("python", "bash")
    ],
)
def test_the_blocks_of_a_page_run(page, tmp_path):
    system = RunningSystem(tmp_path / "state")

    def code(language: str) -> list[str]:
        port = str(system.settings.http.port)
        return [each.replace("8000", port) for each in blocks(page, language)]

    folder = tmp_path / "page"
    folder.mkdir()
    python, bash = code("python"), code("bash")
    for each in python:
        if named := FILE.match(each):
            (folder / named[1]).write_text(each)
    script = [each for each in python if not FILE.match(each)]
    try:
        if script:
            (folder / "page_of_docs.py").write_text("\n".join(script))
            run([sys.executable, "page_of_docs.py"], system, folder)
            assert not system.pids(), "a script leaves nothing running"
        if bash:
            run(["bash", "-euo", "pipefail", "-c", "\n".join(bash)], system, folder)
    finally:
        if system.pids():
            system.stop(forget=True)


def commands(page: Path) -> Iterator[str]:
    """Return the lines of a page that call ``greenroom``."""
    text = page.read_text()
    shown = [code for language, code in BLOCK.findall(text) if language in {"bash", "console"}]
    for code in [*shown, *INDENTED.findall(BLOCK.sub("", text))]:
        for line in code.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*| [|&>].*", "", line.strip().removeprefix("$ "))
            if re.match(r"greenroom [a-z]", command):
                yield command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page):
    for line in commands(page):
        _, name, *words = shlex.split(line)
        command = main.get_command(click.Context(main), name)
        if isinstance(command, click.Group):
            command = command.commands.get(words[0])
        assert command is not None, line
        parameters = command.get_params(click.Context(command))
        known = {flag for each in parameters for flag in each.opts}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_names_its_language(page):
    assert {language for language, _ in BLOCK.findall(page.read_text())} <= LANGUAGES


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
