"""Tests of hello, by pytest and the fixtures that come with Greenroom: see docs/testing.md."""

import json
import urllib.request

from examples.hello import Hello, app
from greenroom import serve


def test_hello_greets_over_http(greenroom_run):
    running = greenroom_run(app)
    with urllib.request.urlopen(running.url + "/?name=Ada") as response:
        assert json.load(response) == {"message": "Hello, Ada!"}


def test_a_class_is_still_a_class():
    assert Hello.func_or_class("Hi").greeting == "Hi"


@serve.deployment
class Doubler:
    def __call__(self, number: int) -> int:
        return 2 * number


def test_doubling_without_a_system():
    handle = serve.run(Doubler.bind(), _local_testing_mode=True)
    assert handle.remote(4).result(timeout_s=5) == 8
    serve.shutdown()
