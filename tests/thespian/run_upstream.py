"""Run Thespian's own tests against our system base.

    python tests/thespian/run_upstream.py [--jobs 4] [pytest arguments]

The tests come with the source archive of the installed version on PyPI, which is fetched once into
a cache folder; nothing of it is copied into this repository. The exit code is 0 only when nothing
fails and no fewer pass than on Thespian's own TCP base. With pytest arguments, such as ``-k name``,
only a part runs and is not compared.

Theory of operation. Each file of tests runs in a process of its own, a few at a time, because most
of the time they sleep; upstream_plugin.py keeps their ports apart. Many measure time, so what fails
beside others is run again alone, and named in the summary when it passes then.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil

HERE = Path(__file__).resolve().parent
TESTS = "thespian/test"

# How many tests pass on Thespian's own multiprocTCPBase, by its version: all of 360 but two that
# skip themselves on every base. (testCommandAbort passes too, unless PYTHONUNBUFFERED is set: it
# expects that a command that is killed has its output still in its buffer.)
PASS_ON_THEIRS = {"4.0.1": 358}

# What takes longest comes first, so that nobody waits for it in the end.
LONGEST = {"test_sourceLoading.py", "test_updateSystemCapabilities.py", "test_troupe.py"}

TIMEOUT_S = 1800  # for everything
TEST_TIMEOUT_S = 180
PORTS = range(10_000, 30_000)  # divided among the jobs
MAX_RUN_AGAIN = 20  # when more fail, it is not for want of time
MARK = "UPSTREAM_RUN"  # in the environment of every process that the tests start


@dataclass
class Outcomes:
    """What became of the tests, by their full names; for those that failed, why."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, other: Outcomes) -> None:
        """Add those of other tests."""
        self.passed |= other.passed
        self.skipped |= other.skipped
        self.failed |= other.failed

    def __str__(self) -> str:
        counts = f"{len(self.passed)} pass, {len(self.failed)} fail, {len(self.skipped)} skip"
        return f"{counts} of {len(self.passed) + len(self.failed) + len(self.skipped)}"


@dataclass(frozen=True)
class Runner:
    """Runs files of tests; ``archive`` is the folder that has them."""

    archive: Path
    jobs: int
    pytest_arguments: list[str]
    scratch: Path
    ends_at: float  # monotonic; what is not done by then has failed

    def run_all(self) -> Outcomes:
        """Run every file, several at a time."""
        files = sorted(filter(_uses_a_system, (self.archive / TESTS).glob("test_*.py")))
        files.sort(key=lambda file: file.name not in LONGEST)
        slots = list(range(self.jobs))
        outcomes = Outcomes()

        def run(file: Path) -> None:
            slot, begun = slots.pop(), time.monotonic()
            found = self.run([str(file)], slot)
            slots.append(slot)
            outcomes.add(found)
            print(f"{file.name}: {found}, {time.monotonic() - begun:.0f} s", flush=True)

        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(run, files))
        return outcomes

    def run(self, what: list[str], slot: int = 0) -> Outcomes:
        """Run files or tests in one process; nothing that they started is left afterwards."""
        mark = uuid.uuid4().hex
        report, output = self.scratch / f"{mark}.xml", self.scratch / f"{mark}.txt"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [*self._command(), f"--junitxml={report}", *what, *self.pytest_arguments],
                cwd=self.archive,
                env=self._environ(mark, slot),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        try:
            process.wait(max(0, self.ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            end_marked(mark)
        if not report.exists():
            said = output.read_text(errors="replace")[-4000:]
            return Outcomes(failed={" ".join(what): f"pytest: {process.returncode}\n{said}"})
        return read_report(report.read_text())

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin"),
            *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(self.archive)),
            *(f"--timeout={TEST_TIMEOUT_S}", "--import-mode=importlib", "--tb=short"),
            *("-o", "python_files=test_*.py", "-o", "junit_family=xunit1"),
        ]

    def _environ(self, mark: str, slot: int) -> dict[str, str]:
        share = len(PORTS) // self.jobs
        own_ports = PORTS[slot * share : (slot + 1) * share]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.archive), str(HERE)]),
            "UPSTREAM_PORTS": f"{own_ports.start}-{own_ports.stop}",
            "THESPLOG_FILE_MAXSIZE": "0",
            "THESPIAN_BASE_IPADDR": "127.0.0.1",
            MARK: mark,
        }
        environ.pop("PYTHONUNBUFFERED", None)  # see PASS_ON_THEIRS
        return environ


def _uses_a_system(file: Path) -> bool:
    """Return whether a file has tests of a base; pytest would take a second to find that none."""
    text = file.read_text()
    return "asys" in text or "multiprocTCPBase" in text


def read_report(text: str) -> Outcomes:
    """Read pytest's report in JUnit's XML."""
    outcomes = Outcomes()
    for case in ET.fromstring(text).iter("testcase"):
        name = full_name(case)
        troubles = [*case.iter("failure"), *case.iter("error")]
        if troubles:
            outcomes.failed[name] = "\n".join(each.text or "" for each in troubles)
        elif case.find("skipped") is not None:
            outcomes.skipped.add(name)
        else:
            outcomes.passed.add(name)
    for name in outcomes.failed:  # passed, and then its fixture failed: two entries
        outcomes.passed.discard(name)
    return outcomes


def full_name(case: ET.Element) -> str:
    """Return the name by which pytest finds the test again."""
    file, names = case.get("file", ""), case.get("classname", "").split(".")
    inside = [name for name in names[len(Path(file).parts) :] if name]
    return "::".join([file, *inside, case.get("name", "")])


def end_marked(mark: str) -> None:
    """Kill what the tests have left: actor systems make sessions of their own."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue


def verdict(outcomes: Outcomes, due: int | None) -> Iterator[str]:
    """Yield what is wrong; nothing when as many pass as ``due``, or, without it, any."""
    for name, reason in outcomes.failed.items():
        yield f"FAILED {name}\n{reason}"
    if due is None:
        if not outcomes.passed:
            yield "no test ran"
    elif len(outcomes.passed) < due:
        yield f"{len(outcomes.passed)} pass, but {due} pass on Thespian's own base"


def fetch(cache: Path, release: str) -> Path:
    """Return the folder of the source archive of ``release``, fetched when the cache has it not."""
    folder = cache / f"thespian-{release}"
    if (folder / TESTS).is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as fresh:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "thespian", "--dest", fresh, f"thespian=={release}"]
        subprocess.run(command, check=True)
        with tarfile.open(Path(fresh) / f"thespian-{release}.tar.gz") as archive:
            archive.extractall(fresh, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
        (Path(fresh) / folder.name).rename(folder)  # whole, or not there
    return folder


def main() -> int:
    """Fetch, run, say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=4, help="how many files at a time")
    parser.add_argument("--cache", type=Path, default=_cache_folder())
    options, pytest_arguments = parser.parse_known_args()
    release = version("thespian")
    due = None if pytest_arguments else PASS_ON_THEIRS.get(release)
    if due is None and not pytest_arguments:
        print(f"PASS_ON_THEIRS has no Thespian {release}: record how many of its tests are to pass")
        return 2
    print(f"Thespian {release}'s own tests", flush=True)
    archive = fetch(options.cache, release)
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(
            archive,
            options.jobs,
            pytest_arguments,
            Path(scratch),
            time.monotonic() + TIMEOUT_S,
        )
        outcomes = runner.run_all()
        again = list(outcomes.failed) if len(outcomes.failed) <= MAX_RUN_AGAIN else []
        for name in again:
            alone = runner.run([name])
            if name in alone.passed:
                print(f"passed only when run again, alone: {name}\n{outcomes.failed.pop(name)}")
            outcomes.add(alone)
    wrong = list(verdict(outcomes, due))
    print(*wrong, outcomes, sep="\n", flush=True)
    return 1 if wrong else 0


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "greenroom-upstream"


if __name__ == "__main__":
    sys.exit(main())
