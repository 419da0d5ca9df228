import itertools
import os

from greenroom.actors.runtime.logs import end_of_log
from greenroom.serve.cli.deploying import Watcher
from greenroom.serve.cli.logs import Line, Logs


def texts(lines):
    return [line.text for line in lines]


def test_the_last_lines_of_each_log_are_read(tmp_path):
    (tmp_path / "a.log").write_text("1\n2\n3\n")
    (tmp_path / "b.log").write_text("4\n")
    (tmp_path / "c.txt").write_text("5\n")
    logs = Logs(tmp_path)
    assert logs.names() == ["a", "b"]
    assert logs.tail(2) == [Line("a", "2"), Line("a", "3"), Line("b", "4")]
    assert list(logs.read()) == []


def test_a_name_picks_logs_however_its_parts_are_separated(tmp_path):
    for name in ("replica-default#Model:v1", "replica-other_Model", "controller"):
        (tmp_path / f"{name}.log").touch()
    assert Logs(tmp_path, name="default#model").names() == ["replica-default#Model:v1"]
    assert len(Logs(tmp_path, name="Model").names()) == 2
    assert Logs(tmp_path, name="controller").names() == ["controller"]
    assert Logs(tmp_path, "replica-default?*.log").names() == ["replica-default#Model:v1"]


def test_only_what_is_new_and_complete_is_read(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("old\n")
    logs = Logs(tmp_path)
    logs.skip()
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert texts(logs.read()) == ["one"]
        file.write("o\n")
        file.flush()
        assert texts(logs.read()) == ["two"]
    (tmp_path / "late.log").write_bytes(b"\xff\n")
    assert texts(logs.read()) == ["\ufffd"]


def test_a_log_that_is_deleted_once_it_is_listed_is_passed_over(tmp_path):
    (tmp_path / "a.log").symlink_to(tmp_path / "deleted")
    logs = Logs(tmp_path)
    logs.skip()
    assert not texts(logs.read())
    assert end_of_log(tmp_path, "a", None) == {}


def test_a_truncated_log_is_read_from_its_start(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("a long line\nrest")
    logs = Logs(tmp_path)
    assert texts(logs.read()) == ["a long line"]
    path.write_text("new\n")
    assert texts(logs.read()) == ["new"]


def test_long_logs_are_read_in_pieces(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"{n:05}\n" for n in range(50_000)))
    logs = Logs(tmp_path)
    assert texts(logs.tail(1)) == ["49999"]
    assert len(list(Logs(tmp_path).read())) == 50_000


def test_following_ends_when_asked_with_what_was_written_last(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("1\n")

    def wait(_seconds):
        with path.open("a") as file:
            file.write("2\n")
        return path.stat().st_size > 4

    assert texts(Logs(tmp_path).follow(wait)) == ["1", "2", "2"]


def test_a_folder_without_logs_has_none(tmp_path):
    assert list(Logs(tmp_path / "missing").read()) == []


class Script:
    """Stands in for waiting: each wait runs the next step; the last one ends it."""

    def __init__(self, *steps):
        self.steps = iter(steps)
        self.waits = []

    def __call__(self, seconds):
        self.waits.append(seconds)
        step = next(self.steps, None)
        if step is None:
            return True
        step()
        return False


clock = itertools.count(1)


def write(path):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("x")
    os.utime(path, ns=(0, next(clock)))


def nothing():
    pass


def test_a_change_is_reported_once_after_the_files_are_still(tmp_path):
    path = tmp_path / "package" / "a.py"
    script = Script(
        nothing,
        lambda: write(path),
        lambda: write(path),  # still being written
        nothing,  # still now: told
        nothing,
        path.unlink,
        nothing,  # told
    )
    assert len(list(Watcher(tmp_path, script).changes())) == 2


def test_only_python_files_outside_of_environments_and_hidden_folders_count(tmp_path):
    paths = ("a.txt", ".git/a.py", "venv/a.py", "__pycache__/a.py", "x/site-packages/a.py")
    script = Script(*(lambda path=path: write(tmp_path / path) for path in paths))
    assert list(Watcher(tmp_path, script).changes()) == []


def test_an_end_while_files_change_is_heeded(tmp_path):
    script = Script(lambda: write(tmp_path / "a.py"))
    assert len(list(Watcher(tmp_path, script).changes())) == 1
