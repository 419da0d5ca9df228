"""How a request reaches user code, and how its response is made fit to be sent."""

import asyncio

import pytest

from greenroom.actors.messages.queries import HttpAnswer

HOST = (b"host", b"test")


def answering(headers=(), body=b"", status=200):
    return lambda asked: HttpAnswer(0, status, tuple(headers), body)


def test_user_code_sees_the_request_as_it_was_sent(app):
    headers = (HOST, (b"x-many", b"1"), (b"x-many", b"2"), (b"content-length", b"2"))
    app.ask("PUT", "/ä/b", raw_path=b"/%C3%A4/b", query=b"q=%20&\xff", headers=headers, body=b"in")
    call = app.dispatcher.asked[0].call
    assert (call.method, call.path, call.raw_path) == ("PUT", "/ä/b", b"/%C3%A4/b")
    assert (call.query_string, call.body) == (b"q=%20&\xff", b"in")
    assert call.headers == headers
    assert (call.scheme, call.http_version, call.root_path) == ("http", "1.1", "")
    assert (call.client, call.server) == (("127.0.0.1", 50000), ("127.0.0.1", 8000))


@pytest.mark.parametrize("sent", ["/api/echo", "/echo"])
def test_the_root_path_is_not_routed_by_whether_or_not_a_proxy_took_it_off(app, sent):
    app.rebuild(root_path="/api/").ask(path=sent)
    asked = app.dispatcher.asked[0]
    assert asked.path == "/echo"
    assert (asked.call.path, asked.call.raw_path) == ("/api/echo", b"/api/echo")
    assert asked.call.root_path == "/api"


def test_a_path_that_only_begins_like_the_root_path_is_below_it(app):
    app.rebuild(root_path="/api").ask(path="/apiary")
    assert app.dispatcher.asked[0].path == "/apiary"
    assert app.dispatcher.asked[0].call.path == "/api/apiary"


def test_our_own_pages_are_found_below_the_root_path_too(app):
    app.rebuild(root_path="/api")
    assert app.ask(path="/api/-/healthz").body == b"success"
    assert app.ask(path="/-/healthz").body == b"success"
    assert not app.dispatcher.asked


def test_the_root_path_itself_is_the_root(app):
    app.rebuild(root_path="/api").ask(path="/api")
    assert app.dispatcher.asked[0].path == "/"


def test_an_absolute_target_is_routed_by_its_path(app):
    app.ask(path="http://test/a/b", raw_path=b"http://test/a/b")
    assert app.dispatcher.asked[0].path == "/a/b"
    assert app.dispatcher.asked[0].call.raw_path == b"/a/b"


def test_a_request_without_host_is_refused_from_http_1_1_on(app):
    assert app.ask(headers=()).status == 400
    assert app.ask(headers=(), http_version="1.0").status == 200


def test_a_body_in_pieces_arrives_whole(app):
    pieces = [{"type": "http.request", "body": b"ab", "more_body": True} for _ in range(3)]
    app.ask("POST", events=[*pieces, {"type": "http.request", "body": b"c"}])
    assert app.dispatcher.asked[0].call.body == b"abababc"


def test_a_truncated_body_never_reaches_user_code(app):
    events = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]
    answer = app.ask("POST", events=events)
    assert (answer.status, answer["connection"]) == (408, "close")
    assert not app.dispatcher.asked


def test_a_body_declared_over_the_limit_is_refused_unread(app):
    app.rebuild(max_body_bytes=10)
    headers = (HOST, (b"content-length", b"11"), (b"expect", b"100-continue"))
    answer = app.ask("POST", headers=headers, events=[])
    assert (answer.status, answer["connection"]) == (413, "close")
    assert "11 bytes" in answer.text
    assert "limit of 10" in answer.text


@pytest.mark.parametrize("sizes", [(11,), (5, 5, 1), (100,)])
def test_a_body_counted_over_the_limit_is_refused(app, sizes):
    app.rebuild(max_body_bytes=10)
    events = [{"type": "http.request", "body": b"x" * n, "more_body": True} for n in sizes[:-1]]
    events.append({"type": "http.request", "body": b"x" * sizes[-1], "more_body": False})
    answer = app.ask("POST", events=[*events, {"type": "http.disconnect"}])
    assert answer.status == 413
    assert not app.dispatcher.asked


def test_a_body_of_exactly_the_limit_is_taken(app):
    headers = (HOST, (b"content-length", b"10"))
    assert app.rebuild(max_body_bytes=10).ask("POST", headers=headers, body=b"x" * 10).status == 200


def test_headers_about_the_connection_are_not_passed_on(app):
    sent = [
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"TE", b"trailers"),
        (b"Trailer", b"x"),
        (b"Upgrade", b"h2c"),
        (b"X-Kept", b"1"),
    ]
    app.dispatcher.handler = answering(sent, b"body")
    names = {name for name, _ in app.ask().headers}
    assert names == {"x-kept", "content-length", "x-request-id"}


@pytest.mark.parametrize(
    "header",
    [
        (b"x-bad", b"1\r\nx-injected: 1"),
        (b"x-bad", b"1\nx"),
        (b"x-bad", b"1\x00"),
        (b"x bad", b"1"),
        (b"x\r\ny", b"1"),
        (b"", b"1"),
    ],
)
def test_a_header_that_would_break_the_response_is_500_naming_it(app, header):
    app.dispatcher.handler = answering([header], b"body")
    answer = app.ask()
    assert answer.status == 500
    assert repr(header[0]) in answer.text
    assert not answer.all("x-injected")


def test_a_status_that_is_none_is_500(app):
    for status in (0, 100, 199, 600):
        app.dispatcher.handler = answering(status=status)
        assert app.ask().status == 500


@pytest.mark.parametrize("declared", [b"1", b"100", b"junk"])
def test_the_content_length_is_the_true_one(app, declared):
    app.dispatcher.handler = answering([(b"Content-Length", declared)], b"four")
    assert app.ask()["content-length"] == "4"


def test_several_cookies_and_other_repeated_headers_stay_separate(app):
    sent = [
        (b"set-cookie", b"a=1"),
        (b"Set-Cookie", b"b=\xe4"),
        (b"link", b"<1>"),
        (b"link", b"<2>"),
    ]
    app.dispatcher.handler = answering(sent)
    answer = app.ask()
    assert answer.all("set-cookie") == ["a=1", "b=ä"]
    assert answer.all("link") == ["<1>", "<2>"]


def test_an_answer_to_head_has_the_length_but_not_the_body(app):
    app.dispatcher.handler = answering(body=b"four")
    answer = app.ask("HEAD")
    assert (answer.body, answer["content-length"]) == (b"", "4")
    app.dispatcher.handler = answering([(b"content-length", b"1234")])
    assert app.ask("HEAD")["content-length"] == "1234"


def test_a_failed_head_has_no_body_either(app):
    app.rebuild(max_body_bytes=1)
    answer = app.ask("HEAD", headers=(HOST, (b"content-length", b"9"), (b"expect", b"x")))
    assert (answer.status, answer.body) == (413, b"")


@pytest.mark.parametrize("status", [204, 205, 304])
def test_statuses_without_body_have_none(app, status):
    app.dispatcher.handler = answering([(b"etag", b'"1"')], b"ignored", status)
    answer = app.ask()
    assert (answer.status, answer.body, answer["etag"]) == (status, b"", '"1"')


def test_the_request_id_of_the_answer_is_ours_not_user_codes(app):
    app.dispatcher.handler = answering([(b"X-Request-ID", b"forged")])
    assert app.ask(headers=(HOST, (b"x-request-id", b"mine")))["x-request-id"] == "mine"


def test_a_client_that_leaves_cancels_the_query_and_is_logged_as_499(app):
    async def hang(asked):
        await asyncio.Event().wait()

    async def leave():
        call = asyncio.create_task(app.call("GET", "/left"))
        while not app.dispatcher.asked:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    app.dispatcher.handler = hang
    asyncio.run(leave())
    assert app.dispatcher.cancelled == 1
    assert app.front.in_flight == 0
    assert app.log()[0]["status"] == 499
