"""Which methods of user code HTTP requests may name, by the header X-Serve-Call-Method."""

import os

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException

from greenroom import serve


class Methods(dict):
    """Has what requests may not name: of a base that is not the user's, and attributes."""

    def __init__(self):
        super().__init__()
        self.secret_tool = os.getpid

    def __call__(self):
        return "called"

    def other(self):
        return "the other method"

    def größe(self):  # noqa: PLC2401
        return "the size"


class ForHandles:
    def double(self, value):
        return 2 * value


guarded = FastAPI()


def knows_the_password(authorization: str = Header("")):
    if authorization != "Basic c2VjcmV0":
        raise HTTPException(401)


@serve.ingress(guarded)
class Guarded:
    @guarded.post("/admin/wipe", dependencies=[Depends(knows_the_password)])
    def wipe(self):
        return "wiped"

    def wipe_all(self):
        return "wiped"


ANY = {"http_call_methods": None}


def ask(one, name="", **request):
    """Return the body of the answer, or why the request is refused."""
    found = one.run(one.http(call_method=name, **request))
    if hasattr(found, "kind"):
        assert found.kind == "InvalidRequestError"
        return found.text
    return found.body.decode()


@pytest.mark.parametrize("name", ["wipe", "wipe_all", "__call__", "nothing"])
def test_no_header_goes_past_an_app_and_what_guards_it(one_process, name):
    one, request = one_process(Guarded, config=ANY), {"path": "/admin/wipe", "method": "POST"}
    assert "detail" in ask(one, **request)
    assert "ASGI app" in ask(one, name, **request)
    allowed = ((b"authorization", b"Basic c2VjcmV0"),)
    assert ask(one, headers=allowed, **request) == '"wiped"'


@pytest.mark.parametrize(
    "name", ["keys", "clear", "fromkeys", "secret_tool", "__class__", "größe\xad", "gr", "x" * 4000]
)
def test_a_request_reaches_no_inherited_method_or_attribute_and_hears_of_none(one_process, name):
    refused = ask(one_process(Methods, config=ANY), name)
    assert "is no method that HTTP requests may call" in refused
    assert not any(each in refused for each in ("the size", "tool,", "keys,", "other"))
    assert len(refused) < 300


def test_only_the_methods_that_an_option_names_are_open_and_it_changes_while_serving(one_process):
    one = one_process(Methods)
    for name in ("other", "__call__"):
        assert "takes no header" in ask(one, name)
    assert ask(one) == "called"
    one.user_code.configure({"max_ongoing_requests": 10, "http_call_methods": ["other"]})
    assert ask(one, "other") == "the other method"
    assert ask(one, "__call__") == "called"
    assert "is no method" in ask(one, "größe")
    one.user_code.configure({"max_ongoing_requests": 10, **ANY})
    assert ask(one, "größe") == "the size"


def test_a_class_without_a_call_answers_handles_and_names_to_requests_what_it_lacks(one_process):
    one = one_process(ForHandles)

    async def double():
        return await one.handle.double.remote(2)

    assert one.run(double()) == 4
    assert "see the option http_call_methods" in ask(one)
