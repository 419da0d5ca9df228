"""``greenroom deploy --plan``, ``history`` and ``undo``: what was changed, and how to go back."""

import json
import time

import pytest

WOULD_CHANGE = 3  # what `greenroom deploy --plan` exits with then
APP = """
from greenroom import serve

@serve.deployment
class Word:
    def __init__(self, word):
        self.word = word
    def __call__(self):
        return self.word

def app(arguments):
    return Word.options(num_replicas=int(arguments.get("replicas", 1))).bind(arguments["word"])
"""
FLAKY = """
import os
from greenroom import serve

@serve.deployment(max_constructor_retry_count=2)
class Flaky:
    def __init__(self):
        if not os.path.exists("FLAG"):
            raise LookupError("no flag")

    def __call__(self):
        return "here"

app = Flaky.bind()
"""


@pytest.fixture
def greenroom(running, invoke, app_dir):
    """Run a command; return what it prints."""
    (app_dir / "mine.py").write_text(APP)
    (app_dir / "flaky.py").write_text(FLAKY.replace("FLAG", str(app_dir / "flag")))

    def run(*words, code=0):
        result = invoke(*words, code=code)
        return result.stderr if code in {1, 2} else result.stdout

    return run


def test_a_plan_says_how_it_would_change_what_runs(greenroom):
    greenroom("deploy", "mine", "word=one")
    planned = greenroom("deploy", "--plan", "mine", "word=one", "replicas=2", code=WOULD_CHANGE)
    assert planned.startswith("~ backend default#Word: num_replicas 1 -> 2; in place\n")
    planned = greenroom("deploy", "--plan", "mine", "word=two", code=WOULD_CHANGE)
    assert "other code; replicas are replaced one after another" in planned


def test_history_names_who_and_undo_takes_back(greenroom, controller):
    assert greenroom("history") == "nothing has been changed yet\n"
    for word in ("one", "two"):
        greenroom("deploy", "mine", f"word={word}")
    undone = greenroom("undo")
    assert undone.endswith("undid change 2: deploy application 'default'\n")
    assert controller.instances["default#Word"]() == "one"
    report = json.loads(greenroom("history", "--json"))
    deployed = "deploy application 'default'"
    assert [each["what"] for each in report] == [deployed, deployed, "undo change 2"]
    assert {each["address"] for each in report} == {"127.0.0.1"}
    assert all(abs(each["at"] - time.time()) < 60 for each in report)
    assert "undo change 2" in greenroom("history", "-n", "1")
    assert "is undone already" in greenroom("undo", "2", code=1)
    greenroom("undo")
    assert controller.instances["default#Word"]() == "two"


def test_what_cannot_be_undone_says_why(greenroom, app_dir):
    (app_dir / "flag").touch()
    greenroom("deploy", "flaky", "--name", "flaky", "--route-prefix", "/flaky")
    greenroom("delete", "flaky")
    (app_dir / "flag").unlink()
    assert "could not be undone: LookupError: no flag" in greenroom("undo", code=1)
    assert "no change has the id 99" in greenroom("undo", "99", code=1)
