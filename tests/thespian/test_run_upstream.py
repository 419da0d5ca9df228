"""How the run of Thespian's own tests is judged; the run itself is a step of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time

import pytest

from tests.support.systems import alive, wait_until
from tests.thespian import run_upstream
from tests.thespian.run_upstream import Outcomes, Runner, end_marked, fetch, read_report, verdict

REPORT = """<testsuites><testsuite>
<testcase classname="test.test_a.TestThis" name="test01[ours]" file="test/test_a.py"/>
<testcase classname="test.test_a" name="test02" file="test/test_a.py">
  <failure message="no">why not</failure></testcase>
<testcase classname="test.test_a" name="test03" file="test/test_a.py">
  <skipped/></testcase>
<testcase classname="test.test_a" name="test04" file="test/test_a.py"/>
<testcase classname="test.test_a" name="test04" file="test/test_a.py">
  <error>teardown</error></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_by_the_names_that_pytest_takes():
    outcomes = read_report(REPORT)
    assert outcomes.passed == {"test/test_a.py::TestThis::test01[ours]"}
    assert outcomes.skipped == {"test/test_a.py::test03"}
    assert outcomes.failed == {
        "test/test_a.py::test02": "why not",
        "test/test_a.py::test04": "teardown",
    }
    assert str(outcomes) == "1 pass, 2 fail, 1 skip of 4"


def test_as_many_as_on_thespians_own_base_are_right():
    assert not list(verdict(Outcomes(passed={"a", "b"}), 2))


def test_fewer_than_on_thespians_own_base_are_wrong_though_none_fails():
    (said,) = verdict(Outcomes(passed={"a"}, skipped={"b"}), 2)
    assert said == "1 pass, but 2 pass on Thespian's own base"


def test_a_failure_is_wrong_and_named_with_its_reason():
    assert list(verdict(Outcomes(passed={"a", "b"}, failed={"c": "why"}), 2)) == ["FAILED c\nwhy"]


def test_a_part_is_not_compared_but_must_not_be_empty():
    assert not list(verdict(Outcomes(passed={"a"}), None))
    assert list(verdict(Outcomes(skipped={"a"}), None)) == ["no test ran"]


@pytest.fixture
def archive(tmp_path):
    """Return the folder of a source archive that has one file of tests."""
    folder = tmp_path / "archive"
    (folder / run_upstream.TESTS).mkdir(parents=True)
    return folder


def run(archive, tmp_path, monkeypatch, text, timeout_s=60):
    """Run one file of tests, without the plugin, which needs Thespian's."""
    monkeypatch.setattr(Runner, "_command", lambda _: [sys.executable, "-m", "pytest", "-q"])
    file = archive / run_upstream.TESTS / "test_it.py"
    file.write_text(text)
    arguments = ["-o", "junit_family=xunit1", f"--rootdir={archive}", "-p", "no:cacheprovider"]
    ends_at = time.monotonic() + timeout_s
    return Runner(archive, 2, arguments, tmp_path, ends_at).run([str(file)], slot=1)


def test_every_job_has_ports_of_its_own(archive, tmp_path, monkeypatch):
    ports = [
        Runner(archive, 3, [], tmp_path, 0)._environ("mark", slot)["UPSTREAM_PORTS"]
        for slot in range(3)
    ]
    ranges = [range(*map(int, each.split("-"))) for each in ports]
    assert len({port for each in ranges for port in each}) == sum(map(len, ranges))


def test_nothing_that_the_tests_start_is_left(archive, tmp_path, monkeypatch):
    text = (
        "import subprocess, sys\n"
        "def test():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                             start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    )
    outcomes = run(archive, tmp_path, monkeypatch, text)
    assert outcomes.passed == {f"{run_upstream.TESTS}/test_it.py::test"}
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid), 10, "it is killed")


def test_only_what_bears_the_mark_is_ended():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    environ = {**os.environ, run_upstream.MARK: "another"}
    with subprocess.Popen(command, env=environ) as other:
        end_marked("mine")
        time.sleep(0.1)
        assert other.poll() is None
        other.kill()


def test_a_file_that_ends_pytest_fails_with_what_was_said(archive, tmp_path, monkeypatch):
    outcomes = run(
        archive, tmp_path, monkeypatch, "import os\nprint('bye', flush=True)\nos._exit(3)"
    )
    (reason,) = outcomes.failed.values()
    assert reason.startswith("pytest: 3")


def test_a_file_that_takes_too_long_fails(archive, tmp_path, monkeypatch):
    outcomes = run(archive, tmp_path, monkeypatch, "import time\ntime.sleep(600)", timeout_s=1)
    assert len(outcomes.failed) == 1


def test_the_archive_is_fetched_once_and_whole_or_not_at_all(tmp_path, monkeypatch):
    fetched = []

    def download(command, *, check):
        fetched.append(command[-1])
        folder = tmp_path / "made" / "thespian-1.2" / run_upstream.TESTS
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(os.path.join(command[-2], "thespian-1.2.tar.gz"), "w:gz") as archive:
            archive.add(tmp_path / "made" / "thespian-1.2", "thespian-1.2")

    monkeypatch.setattr(subprocess, "run", download)
    first, second = (fetch(tmp_path / "cache", "1.2") for _ in range(2))
    assert first == second == tmp_path / "cache" / "thespian-1.2"
    assert (first / run_upstream.TESTS).is_dir()
    assert fetched == ["thespian==1.2"]
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["thespian-1.2"]


def test_another_release_of_thespian_must_be_recorded_first(monkeypatch, capsys):
    monkeypatch.setattr(run_upstream, "version", lambda _: "9.9")
    monkeypatch.setattr(sys, "argv", ["run_upstream.py"])
    assert run_upstream.main() == 2
    assert "PASS_ON_THEIRS has no Thespian 9.9" in capsys.readouterr().out
