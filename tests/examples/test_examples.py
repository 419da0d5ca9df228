"""The examples as a user runs them: through the command line, from the folder of the clone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.systems import RunningSystem

CLONE = Path(__file__).parents[2]


@pytest.fixture
def hello(tmp_path):
    yield from deployed(tmp_path, "examples.hello:app")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    yield from deployed(tmp_path_factory.mktemp("digits"), "examples.digits.app")


def deployed(folder, target):
    system = RunningSystem(folder / "state")
    try:
        done = system.understudy("run", "--non-blocking", target, cwd=CLONE)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"deployed 'default' at {system.url}/\n"
        yield system
    finally:
        system.stop()


def test_hello_answers_what_the_readme_says(hello):
    status, body = hello.get("/?name=Ada")
    assert (status, body) == (200, b'{"message":"Hello, Ada!"}')
    readme = (CLONE / "README.md").read_text(encoding="utf-8")
    assert body.decode() in readme


def test_the_readme_shows_the_code_of_hello():
    code = (CLONE / "examples/hello.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert code in (CLONE / "README.md").read_text(encoding="utf-8")


def test_digits_reads_more_than_nine_of_ten_held_out_images_right(digits):
    done = subprocess.run(
        [sys.executable, "-m", "examples.digits.client", digits.url + "/"],
        cwd=CLONE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"accuracy (\S+): (\d+) of 899 images, 2 replicas\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.9
    print(done.stdout)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[1, 2", b"expected a JSON list of numbers: "),
        (b'["a", "b"]', b"expected a JSON list of numbers: "),
        (b"[0, 1]", b"expected 64 numbers, got the shape [2]"),
    ],
)
def test_digits_refuses_what_is_no_image(digits, body, told):
    status, text = digits.get("/", data=body)
    assert status == 400
    assert text.startswith(told)
