"""The examples as a user runs them: through the command line, from the folder of the clone."""

from __future__ import annotations

import functools
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from websockets.sync.client import connect

from tests.support.systems import RunningSystem, wait_until

CLONE = Path(__file__).parents[2]


SHOWN = {
    "audited.py": "docs/logging.md",
    "counting.py": "docs/http.md",
    "crowded.py": "docs/overload.md",
    "greetings.py": "docs/multiplexed-models.md",
    "hello.py": "README.md",
    "live.py": "docs/websockets.md",
    "nearest.py": "docs/batching.md",
    "pipeline.py": "docs/tutorial.md",
    "reports.py": "docs/jobs.md",
    "stories.py": "docs/composition.md",
    "test_hello.py": "docs/testing.md",
    "timing.py": "docs/http.md",
}
TIMED = ("--http-middlewares", "examples.timing:Timing", "--http-cors", "https://shop.example")


class Example:
    """One example, below a route of its own on the system of all."""

    def __init__(self, system, name):
        self.name = name
        self.url = f"{system.url}/{name}"
        self.greenroom = system.greenroom
        self._get = system.get

    def get(self, path, **options):
        return self._get(f"/{self.name}{path}", **options)


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    started = RunningSystem(tmp_path_factory.mktemp("example") / "state")
    try:
        done = started.greenroom("start", *TIMED)
        assert done.returncode == 0, done.stderr
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def example(system):
    """Return what deploys an example once, by the name of its module."""

    @functools.cache
    def deploy(name, target=""):
        where = ("--name", name, "--route-prefix", f"/{name}")
        target = target or f"examples.{name}:app"
        done = system.greenroom("run", "--non-blocking", *where, target, cwd=CLONE)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"deployed {name!r} at {system.url}/{name}\n"
        return Example(system, name)

    return deploy


@pytest.mark.parametrize(("example", "page"), SHOWN.items())
def test_a_page_shows_the_code_of_its_example(example, page):
    code = (CLONE / "examples" / example).read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert code in (CLONE / page).read_text(encoding="utf-8")


def test_hello_answers_what_the_readme_says(example):
    hello = example("hello")
    status, body = hello.get("/?name=Ada")
    assert (status, body) == (200, b'{"message":"Hello, Ada!"}')
    readme = (CLONE / "README.md").read_text(encoding="utf-8")
    assert body.decode() in readme


def test_counting_counts_whole_and_in_parts(example):
    counting = example("counting")
    assert counting.get("/up-to/6?by=2") == (200, b"[2,4,6]")
    assert counting.get("/slowly/3") == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n")
    assert counting.get("/up-to/many")[0] == 422


def test_live_counts_words_while_they_come_and_takes_uploads(example):
    live = example("live")
    with connect(f"ws{live.url.removeprefix('http')}/count") as client:
        for text, total in (("to be or not to be", 6), ("that is the question", 10)):
            client.send(text)
            assert json.loads(client.recv(10)) == {"words": total}
    body = b"x" * 5_000_000
    expected = b'{"sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()
    assert live.get("/checksum", data=body, method="PUT") == (200, expected)


def test_audited_logs_json_that_names_the_request(example):
    audited = example("audited")
    status, body = audited.get("/?item=salt", headers={"X-Request-ID": "r1"})
    assert (status, json.loads(body)["request"]) == (200, "r1")

    def logged():
        lines = audited.greenroom("logs", "audited").stdout.splitlines()
        found = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
        return found[1:] and found

    sold, ended = wait_until(logged, 10, "two lines are logged")
    assert (sold["message"], sold["item"], sold["request_id"]) == ("sold salt", "salt", "r1")
    assert (ended["path"], ended["status"], ended["version"]) == ("/audited/", 200, "3")


@pytest.mark.slow
def test_the_tests_of_hello_pass(tmp_path):
    plugin = ("-p", "greenroom.serve.testing", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *plugin,
            f"--basetemp={tmp_path}/base",
            "examples/test_hello.py",
        ],
        cwd=CLONE,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_timing_reports_how_long_a_request_took(example):
    timed_hello = example("hello")
    request = urllib.request.Request(timed_hello.url, headers={"Origin": "https://shop.example"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert re.fullmatch(r"total;dur=\d+\.\d", response.headers["server-timing"])
        assert response.headers["access-control-allow-origin"] == "https://shop.example"


def test_nearest_answers_many_at_a_time(example):
    nearest = example("nearest")
    places = {"51,0": b"London", "52,13": b"Berlin", "41,3": b"Barcelona"}

    def ask(place):
        return nearest.get(f"/?at={place}")

    with ThreadPoolExecutor(12) as pool:
        asked = list(places) * 4
        for place, (status, body) in zip(asked, pool.map(ask, asked), strict=True):
            assert (status, body) == (200, places[place])
    assert nearest.get("/?at=here")[0] == 400


@pytest.mark.slow
def test_chars_writes_for_several_clients_of_openai_at_once(example):
    def write(tokens):
        with openai.OpenAI(base_url=f"{chars.url}/v1", api_key="none") as client:
            messages = [{"role": "user", "content": "The attribute "}]
            parts = client.chat.completions.create(
                model="chars", messages=messages, max_tokens=tokens, stream=True
            )
            return [part.choices[0].delta.content for part in parts][1:-1]

    chars = example("chars")
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(write, range(20, 26)))
    assert list(map(len, texts)) == list(range(20, 26))
    assert all(len(letter) == 1 for text in texts for letter in text)


def test_greetings_have_a_model_for_each_language(example):
    greetings = example("greetings")
    for language, words in [("fr", b"Bonjour"), ("de", b"Guten Tag"), ("fr", b"Bonjour")]:
        headers = {"serve_multiplexed_model_id": language}
        assert greetings.get("/", headers=headers) == (200, words)
    assert greetings.get("/")[0] == 404


@pytest.mark.slow
def test_the_classifier_names_a_flower_and_documents_itself(example):
    classifier = example("classifier")
    flower = json.dumps({"sepal": [5.1, 3.5], "petal": [1.4, 0.2]}).encode()
    json_body = {"content-type": "application/json"}
    status, body = classifier.get("/predict", data=flower, headers=json_body)
    assert (status, json.loads(body)["name"]) == (200, "setosa")
    assert classifier.get("/predict", data=b"{}", headers=json_body)[0] == 422
    assert "/predict" in json.loads(classifier.get("/openapi.json")[1])["paths"]


def test_the_pipeline_adds_a_tax(example):
    assert example("pipeline").get("/?net=100") == (200, b'{"price":119.0}')


def test_reports_are_made_after_their_connection_has_ended(example):
    reports = example("reports")
    status, body = reports.get("/make", data=b'{"year": 2024}')
    assert status == 202
    result = f"/{json.loads(body)['id']}/result"
    answer = wait_until(lambda: (got := reports.get(result))[0] == 200 and got, 20, "its result")
    assert json.loads(answer[1]) == {"year": 2024}


def test_stories_are_streamed_through_three_deployments(example):
    stories = example("stories")
    lines = "line=all+the+world+is+a+stage&line=give+me+light"
    status, body = stories.get(f"/?{lines}")
    words = {"stage": ["age", "page", "cage"], "light": ["night", "might", "flight"]}
    found = [f"{word}: {rhyme}\n" for word, rhymes in words.items() for rhyme in rhymes]
    assert (status, body.decode()) == (200, "".join(found))
    assert stories.get("/?line=no+such+word") == (200, b"")


def test_crowded_lets_as_many_wait_as_may_and_turns_away_the_others(example):
    crowded = example("crowded")

    def ask(job):
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(crowded.url).netloc)
        connection.request("POST", f"/crowded/?job={job}")
        response = connection.getresponse()
        body, after = response.read(), response.headers["Retry-After"]
        connection.close()
        return response.status, body, after

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    done = [body for status, body, _ in answers if status == 200]
    turned_away = [(body, after) for status, body, after in answers if status == 503]
    assert len(done) + len(turned_away) == 40
    assert len(done) >= 10, "two that run and eight that wait"
    assert turned_away
    assert all(b"queued" in body or b"could begin" in body for body, _ in turned_away)
    assert all(int(after) >= 1 for _, after in turned_away)


@pytest.fixture(scope="module")
def digits(example):
    return example("digits", "examples.digits.app")


@pytest.mark.slow
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
    ("body", "message"),
    [
        (b"[1, 2", b"expected a JSON list of numbers: "),
        (b'["a", "b"]', b"expected a JSON list of numbers: "),
        (b"[0, 1]", b"expected 64 numbers, got the shape [2]"),
    ],
)
def test_digits_refuses_what_is_no_image(digits, body, message):
    status, text = digits.get("/", data=body)
    assert status == 400
    assert text.startswith(message)
