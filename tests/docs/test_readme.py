"""README's code runs as it stands: all of it, in its order, as one script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from greenroom.actors.host.records import RunRecords
from tests.support.systems import CLI_TIMEOUT_S, RunningSystem

README = Path(__file__).parents[2] / "README.md"


def test_the_code_of_the_readme_runs_as_one_script(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    system = RunningSystem(tmp_path / "state")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **system.environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CLI_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not RunRecords(system.settings.run_dir).alive()


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) < 200
