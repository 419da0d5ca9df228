"""What user code sees of a request, and what a client gets for each way a query can end."""

import asyncio

import pytest

from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer
from greenroom.core.errors import BackPressureError
from greenroom.http_front.bodies import AT_ONCE_S, EARLY, WHOLE
from greenroom.http_front.pages import PAGE_TIMEOUT_S
from tests.http.wire import Conversation, connected, turn_over

pytestmark = pytest.mark.anyio

HOST = (b"host", b"test")
WANTS_JSON = (HOST, (b"accept", b"application/json"))
CHUNKED = (HOST, (b"transfer-encoding", b"chunked"))
METHODS = ("train", "__call__", "größe")
NO_LIMITS = (b"soon", b"0", b"-1", b"nan", b"inf", b"")


def failing(kind, text="why", **fields):
    return lambda asked: FailedAnswer(0, kind, text, **fields)


def answering(headers=(), body=b"", status=200):
    return lambda asked: HttpAnswer(0, status, tuple(headers), body)


# --- what reaches user code -----------------------------------------------------------------------


def test_user_code_sees_the_request_as_it_was_sent(app):
    headers = (HOST, (b"x-many", b"1"), (b"x-many", b"2"), (b"content-length", b"2"))
    app.ask("PUT", "/%C3%A4/b?q=%20&%FF", headers=headers, body=b"in")
    call = app.link.asked[0].call
    assert (call.method, call.path, call.raw_path) == ("PUT", "/ä/b", b"/%C3%A4/b")
    assert (call.query_string, call.body) == (b"q=%20&%FF", b"in")
    assert call.headers == headers
    assert (call.scheme, call.http_version, call.root_path) == ("http", "1.1", "")
    assert (call.client, call.server) == (("127.0.0.1", 5), ("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("sent", "path", "full_path"),
    [
        ("/api/echo", "/echo", "/api/echo"),
        ("/echo", "/echo", "/api/echo"),
        ("/apiary", "/apiary", "/api/apiary"),
        ("/api", "/", "/api"),
    ],
)
def test_the_root_path_is_not_routed_by_whether_or_not_a_proxy_took_it_off(
    app, sent, path, full_path
):
    app.rebuild(root_path="/api/").ask(target=sent)
    asked = app.link.asked[0]
    assert (asked.path, asked.call.path) == (path, full_path)
    assert (asked.call.raw_path, asked.call.root_path) == (full_path.encode(), "/api")


def test_an_absolute_target_is_routed_by_its_path(app):
    app.ask(target="http://test/a/b")
    assert app.link.asked[0].path == "/a/b"
    assert app.link.asked[0].call.raw_path == b"/a/b"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ((HOST, (b"content-length", b"11"), (b"expect", b"100-continue")), b"", 413),
        (CHUNKED, b"b\r\n" + b"x" * 11 + b"\r\n", 413),
        (CHUNKED, b"5\r\nxxxxx\r\n" * 2 + b"1\r\nx\r\n", 413),
        ((HOST, (b"content-length", b"10")), b"x" * 10, 200),
        ((HOST, (b"content-length", b"11")), b"x" * 11, 413),
    ],
)
def test_a_body_over_the_limit_is_413_by_its_declaration_or_its_bytes(app, headers, body, status):
    answer = app.rebuild(max_body_bytes=10).ask("POST", headers=headers, body=body)
    assert answer.status == status
    if status == 413:
        assert answer["connection"] == "close"
        assert "limit of 10" in answer.text
    assert len(app.link.asked) == (status == 200)


def posting(length=None, **headers):
    size = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    lines = [b"%b: %b" % (name.encode(), value) for name, value in headers.items()]
    return b"\r\n".join([b"POST / HTTP/1.1", b"host: test", size, *lines, b"", b""])


@pytest.mark.parametrize("length", [None, 9])
async def test_a_truncated_body_never_reaches_user_code(app, length):
    connection = connected(app.front)
    connection.say(posting(length) + b"4\r\nhalf")
    await turn_over()
    await connection.end()
    assert (connection.wire.written, app.link.asked) == (b"", [])
    assert app.log()[0]["status"] == 499


async def test_a_large_body_takes_no_slot_before_its_first_mebibyte_is_here(app):
    connection = connected(app.front)
    connection.say(posting(2 * WHOLE))
    for _ in range(WHOLE // 65536):
        assert not app.link.asked
        connection.say(b"x" * 65536)
        await turn_over()
    connection.say(b"x" * WHOLE)
    await turn_over()
    await connection.end()
    assert app.link.asked[0].call.body == b"x" * 2 * WHOLE


@pytest.mark.parametrize("waits", [False, True])
async def test_of_one_client_few_queries_leave_before_that(app, waits):
    app.link.handler = lambda _asked: asyncio.Event().wait()
    head = posting(2 * WHOLE, expect=b"100-continue") if waits else posting()

    first = connected(app.front)
    talks = [first] + [
        Conversation(app.front, app.front.options, connections=first.connections)
        for _ in range(2 * EARLY)
    ]
    proxied = [head.replace(b"host", b"x-forwarded-for: 9.9.9.9\r\nhost")]
    begun = 0

    async def submitted(query, on_upload=None):
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    app.link.ask = submitted
    for talk in talks[1:]:
        talk.say(head if waits else head + b"1\r\nx\r\n")
    while begun < EARLY:
        await asyncio.sleep(0)
    await asyncio.sleep(2 * AT_ONCE_S)
    assert begun == EARLY
    talks[0].say(proxied[0] if waits else proxied[0] + b"1\r\nx\r\n")
    while begun < EARLY + 1:  # another client
        await asyncio.sleep(0)
    talks[-1].say(b"x" * 2 * WHOLE if waits else b"0\r\n\r\n")  # it is here
    while begun < EARLY + 2:
        await asyncio.sleep(0)
    talks[1].protocol.connection_lost(None)
    await turn_over()
    talks[1] = Conversation(app.front, app.front.options, connections=first.connections)
    talks[1].say(head if waits else head + b"1\r\nx\r\n")
    while begun < EARLY + 3:  # its place is free again
        await asyncio.sleep(0)
    for talk in talks:
        talk.protocol.connection_lost(None)
    await first.end()


async def test_a_query_with_its_first_mebibyte_takes_no_place_of_those_that_leave_before(app):
    begun = []

    async def submitted(query, on_upload=None):
        begun.append(query)
        await asyncio.Event().wait()

    first = connected(app.front)
    app.link.ask = submitted
    talks = [first] + [
        Conversation(app.front, app.front.options, connections=first.connections)
        for _ in range(EARLY)
    ]
    for talk in talks[1:]:
        talk.say(posting() + b"%x\r\n%b\r\n" % (WHOLE, bytes(WHOLE)))
    while len(begun) < EARLY:
        await asyncio.sleep(0)
    first.say(posting() + b"1\r\nx\r\n")
    while len(begun) < EARLY + 1:
        await asyncio.sleep(0)
    for talk in talks:
        talk.protocol.connection_lost(None)
    await first.end()


@pytest.mark.parametrize("middlewares", [[], [("tests.support.middlewares:Buffer", {})]])
async def test_a_body_that_comes_too_slowly_is_408_also_where_a_middleware_reads_it(
    app, middlewares
):
    app.rebuild(middlewares=middlewares)
    connection = connected(app.front)
    connection.say(posting(100))
    await turn_over()
    now = asyncio.get_running_loop().time() + app.front.options.body_timeout_s + 1
    connection.connections.close_idle(now)
    await turn_over()
    written = connection.wire.written
    await connection.end()
    assert written.startswith(b"HTTP/1.1 408 ")
    assert b"too slowly" in written
    assert [line["status"] for line in app.log()] == [408]


@pytest.mark.parametrize(
    ("own", "value", "timeout_s"),
    [(None, b"1e2", 100), (7, b"0.5", 0.5), (7, b"3", 3), (7, b"1e2", 7), (7, None, 7)],
)
def test_the_timeout_header_shortens_the_servers_and_never_lengthens_it(app, own, value, timeout_s):
    app.rebuild(request_timeout_s=own)
    app.ask(headers=(HOST, *([(b"x-request-timeout-seconds", value)] if value else [])))
    assert app.link.asked[0].timeout_s == timeout_s


@pytest.mark.parametrize(
    ("header", "sent", "field", "value"),
    [
        *((b"x-serve-call-method", each.encode(), "call_method", each) for each in METHODS),
        (b"x-serve-shard-key", b"k", "shard_key", "k"),
        (b"x-serve-shard-key", b"k\xc3\xa4", "shard_key", "k\xe4"),  # UTF-8, or else Latin-1
        (b"x-serve-shard-key", b"k\xe4", "shard_key", "k\xe4"),
        (b"x-serve-shard-key", b"", "shard_key", ""),
        (b"x_serve_shard_key", b"k", "shard_key", None),
        (b"serve_multiplexed_model_id", "grün".encode(), "multiplexed_model_id", "grün"),
        *((b"x-request-timeout-seconds", each, "timeout_s", None) for each in NO_LIMITS),
    ],
)
def test_headers_of_ours_are_fields_of_the_query(app, header, sent, field, value):
    assert app.ask(headers=(HOST, (header, sent))).status == 200
    (asked,) = app.link.asked
    assert getattr(asked, field) == value


def test_of_headers_with_an_underscore_the_model_id_alone_reaches_user_code(app):
    model = (b"serve_multiplexed_model_id", b"m")
    app.ask(headers=(HOST, model, (b"x_serve_shard_key", b"k")))
    assert app.link.asked[0].call.headers == (HOST, model)


@pytest.mark.parametrize("value", ["__init__", "_private", "no method", "", "reconfigure"])
def test_a_bad_call_method_is_400_naming_header_and_value(app, value):
    answer = app.ask(headers=(HOST, (b"X-Serve-Call-Method", value.encode())))
    assert answer.status == 400
    assert "X-Serve-Call-Method" in answer.text
    assert repr(value) in answer.text
    assert not app.link.asked


def test_two_call_methods_are_refused_for_a_proxy_may_have_checked_the_other(app):
    header = b"x-serve-call-method"
    answer = app.ask(headers=(HOST, (header, b"public"), (header, b"other")))
    assert (answer.status, "given 2 times" in answer.text) == (400, True)
    assert not app.link.asked


# --- what the client gets -------------------------------------------------------------------------


def test_an_answer_passes_with_its_status_headers_and_body(app):
    sent = [
        (b"X-Made", b"here"),
        (b"set-cookie", b"a=1"),
        (b"Set-Cookie", b"b=\xe4"),
        (b"link", b"<1>"),
        (b"link", b"<2>"),
        (b"X-Request-ID", b"forged"),
        (b"Content-Length", b"100"),
    ]
    app.link.handler = answering(sent, b"new", 201)
    answer = app.ask("POST", "/things", headers=(HOST, (b"x-request-id", b"mine")))
    assert (answer.status, answer["x-made"], answer.body) == (201, "here", b"new")
    assert (answer["content-length"], answer["x-request-id"]) == ("3", "mine")
    assert answer.all("set-cookie") == ["a=1", "b=ä"]
    assert answer.all("link") == ["<1>", "<2>"]


def test_a_status_that_http_does_not_know_passes_as_it_is(app):
    app.link.handler = answering([], b"as some sites have it", 999)
    assert app.ask().status == 999
    assert app.log()[0]["status"] == 999


def test_headers_about_the_connection_are_not_passed_on(app):
    sent = [
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
        (b"Transfer-Encoding", b"chunked"),
        (b"TE", b"trailers"),
        (b"Trailer", b"x"),
        (b"Upgrade", b"h2c"),
        (b"X-Kept", b"1"),
    ]
    app.link.handler = answering(sent, b"body")
    assert set(app.ask().headers) - {"date"} == {"x-kept", "content-length", "x-request-id"}


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
    app.link.handler = answering([header], b"body")
    answer = app.ask()
    assert answer.status == 500
    assert repr(header[0]) in answer.text
    assert not answer.all("x-injected")


@pytest.mark.parametrize("status", [0, 100, 199, 1000])
def test_a_status_that_is_none_is_500(app, status):
    app.link.handler = answering(status=status)
    assert app.ask().status == 500


def test_an_answer_to_head_has_the_length_but_not_the_body(app):
    app.link.handler = answering(body=b"four")
    answer = app.ask("HEAD")
    assert (answer.body, answer["content-length"]) == (b"", "4")
    app.link.handler = answering([(b"content-length", b"1234")])
    assert app.ask("HEAD")["content-length"] == "1234"
    refused = app.ask("HEAD", headers=())
    assert (refused.status, refused.body) == (400, b"")


@pytest.mark.parametrize("status", [204, 205, 304])
def test_statuses_without_body_have_none(app, status):
    app.link.handler = answering([(b"etag", b'"1"')], b"ignored", status)
    answer = app.ask()
    assert (answer.status, answer.body, answer["etag"]) == (status, b"", '"1"')


@pytest.mark.parametrize(
    ("kind", "status", "headers"),
    [
        ("QueryTimeoutError", 408, {}),
        ("BackPressureError", 503, {"retry-after": "1"}),
        ("ReplicaUnavailableError", 503, {"retry-after": "1"}),
        ("DeploymentUnavailableError", 503, {"retry-after": "5"}),
        ("NotRunningError", 503, {"retry-after": "1"}),
        ("MethodNotAllowedError", 405, {"allow": "GET, POST"}),
        ("FromTheFutureError", 500, {}),
    ],
)
def test_each_failure_has_its_status(app, kind, status, headers):
    app.link.handler = failing(kind, allowed=("GET", "POST"))
    answer = app.ask("DELETE")
    assert answer.status == status
    assert "why" in answer.text
    assert {name: answer[name] for name in headers} == headers


@pytest.mark.parametrize(("seconds", "header"), [(0.01, "1"), (2.1, "3")])
def test_the_time_to_come_back_is_in_whole_seconds(app, seconds, header):
    app.link.handler = failing("BackPressureError", retry_after_s=seconds)
    assert app.ask()["retry-after"] == header


def test_an_unknown_route_is_404_and_says_where_the_routes_are(app):
    app.link.handler = failing("RouteNotFoundError")
    answer = app.ask(target="/nowhere")
    expected = "Path '/nowhere' not found. Ping /-/routes for available routes."
    assert (answer.status, answer.text) == (404, expected)
    assert answer["content-type"].startswith("text/plain")


@pytest.mark.parametrize("headers", [(HOST,), WANTS_JSON])
def test_an_exception_in_user_code_is_500_with_the_request_id_and_no_traceback(app, headers):
    text = "ValueError: boom\nTraceback (most recent call last):\n  File secret.py"
    app.link.handler = failing("UserCodeError", text, traceback="Traceback: secret.py")
    answer = app.ask(headers=headers)
    assert answer.status == 500
    assert answer["x-request-id"] in answer.text
    assert "boom" in answer.text
    assert "Traceback" not in answer.text
    assert "secret" not in answer.text


def test_an_error_is_json_for_a_client_that_asks_for_it(app):
    app.link.handler = failing("UserCodeError", "ValueError: boom")
    answer = app.ask(headers=WANTS_JSON)
    assert answer["content-type"] == "application/json"
    assert answer.json == {
        "error": "UserCodeError",
        "message": "ValueError: boom",
        "request_id": answer["x-request-id"],
    }


def test_an_error_of_ours_raised_by_the_link_is_answered_by_its_status(app):
    def refuse(asked):
        raise BackPressureError("full")

    app.link.handler = refuse
    answer = app.ask()
    assert (answer.status, answer["retry-after"]) == (503, "1")


@pytest.mark.parametrize("how", ["raises", "no answer"])
def test_any_other_error_is_500_without_its_text_and_the_front_goes_on(app, caplog, how):
    def break_down(asked):
        if how == "raises":
            raise RuntimeError("secret")

    app.link.handler = break_down
    answer = app.ask()
    assert answer.status == 500
    assert answer["x-request-id"] in answer.text
    assert "secret" not in answer.text
    assert "failed" in caplog.text
    app.link.handler = answering(body=b"on")
    assert app.ask().text == "on"
    assert [line["status"] for line in app.log()] == [500, 200]


def test_an_id_made_here_is_never_made_twice(app):
    ids = {app.ask()["x-request-id"] for _ in range(20)}
    assert len(ids) == 20


@pytest.mark.parametrize(
    ("offered", "is_taken"),
    [(b"a b/c~", True), (b"x" * 200, True), (b"", False), (b"x" * 201, False), (b"\xff", False)],
)
def test_a_clients_request_id_is_taken_over_if_it_is_fit(app, offered, is_taken):
    answer = app.ask(headers=(HOST, (b"x-request-id", offered)))
    assert answer["x-request-id"] == app.link.asked[0].request_id
    assert (answer["x-request-id"].encode() == offered) is is_taken


# --- our own pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_health_is_success_once_there_is_a_route_table(app, root_path):
    app.rebuild(root_path=root_path)
    app.link.ready = False
    unready = app.ask(target=f"{root_path}/-/healthz")
    app.link.ready = True
    ready = app.ask(target="/-/healthz")
    assert (unready.status, unready["retry-after"]) == (503, "1")
    assert (ready.status, ready.body) == (200, b"success")
    assert not app.link.asked


def test_readiness_names_the_applications_that_cannot_serve(app):
    assert (app.ask(target="/-/readyz").status, app.ask(target="/-/readyz").body) == (200, b"ready")
    app.link.lacks = {
        "shop#Tax": {"shop#Tax#2c0ffee": ("", True), "shop#Tax#new": ("", False)},
        "shop#Shop": {"shop#Shop": ("boom", True)},
        "new#New": {"new#New": ("", False)},
        "plain": {"plain:v1": ("", True), "plain:v2": ("", True)},
        "lost#Lost": None,
    }
    unready = app.ask(target="/-/readyz")
    assert (unready.status, unready["retry-after"]) == (503, "1")
    assert unready.text.startswith(
        "cannot serve: application 'shop' (no replica of Tax, Shop: boom); "
        "endpoint 'plain' (no replica of plain:v1, plain:v2); "
        "application 'lost' (its record is damaged)\n"
    )
    assert app.ask(target="/-/healthz").status == 200, "this worker can take queries"
    app.link.lacks = None
    assert "no route table yet" in app.ask(target="/-/readyz").text
    app.link.lacks, app.link.ready = {}, False
    assert app.ask(target="/-/readyz").status == 503


def test_readiness_of_one_application_is_its_own_and_new_ones_count(app):
    app.link.lacks = {
        "other#D": {"other#D": ("", True)},
        "shop#Shop": {},
        "shop#Tax": {},
        "new#Model": {"new#Model#2c0ffee": ("boom", False)},
        "plain": {},
        "lost#Lost": None,
    }

    def asked(name):
        answer = app.ask(target=f"/-/readyz?application={name}")
        return answer.status, answer.text.partition("\n")[0]

    assert asked("shop") == asked("plain") == (200, "ready")
    message = "cannot serve: application 'new' (no replica of Model: boom)"
    assert asked("new") == (503, message)
    assert asked("lost") == (503, "cannot serve: application 'lost' (its record is damaged)")
    assert asked("sho") == (503, "there is no application 'sho'")
    assert asked("")[1].startswith("cannot serve: application 'other'")
    for query in ("app=shop", "application=shop&application=new", "application=shop&x"):
        refused = app.ask(target=f"/-/readyz?{query}")
        assert refused.status == 400, query
        message = "give each field once" if "new" in query else "expected application=... alone"
        assert message in refused.text
    app.link.lacks = None
    assert "no route table yet" in asked("shop")[1]


@pytest.mark.parametrize("page", ["readyz", "metrics"])
def test_a_query_of_very_many_fields_is_refused(app, page):
    answer = app.ask(target=f"/-/{page}?" + "&".join(f"x{n}=1" for n in range(60)))
    assert (answer.status, "give at most 50 fields" in answer.text) == (400, True)


def test_while_draining_health_and_new_queries_are_503_and_the_connection_closes(app):
    app.front.drain()
    for target in ("/-/healthz", "/-/readyz", "/"):
        answer = app.ask(target=target)
        assert (answer.status, answer["retry-after"], answer["connection"]) == (503, "1", "close")
    assert not app.link.asked


async def test_metrics_are_scraped_once_at_a_time_and_kept_for_a_second(app, monkeypatch):
    clock, scraped, gate = [100.0], [], asyncio.Event()
    monkeypatch.setattr("greenroom.http_front.link.monotonic", lambda: clock[0])

    async def metrics(*, whole):
        scraped.append(whole)
        await gate.wait()
        return b"text %d" % len(scraped)

    monkeypatch.setattr(app.link, "metrics", metrics)

    async def ask(*targets):
        asking = [asyncio.create_task(app.call("GET", target)) for target in targets]
        await turn_over()
        gate.set()
        return [(await each).text for each in asking]

    own, every = "/-/metrics?host=self", "/-/metrics"
    assert await ask(every, every, own) == ["text 2", "text 2", "text 2"]
    assert sorted(scraped) == [False, True]
    clock[0] += 0.9
    assert await ask(every) == ["text 2"]
    clock[0] += 0.2
    assert await ask(every) == ["text 3"]


def test_routes_are_json_and_metrics_are_prometheus_text(app):
    routes, metrics = app.ask(target="/-/routes"), app.ask(target="/-/metrics")
    assert (routes.json, routes["content-type"]) == ({"/": "echo"}, "application/json")
    assert metrics.body.startswith(b"# TYPE greenroom_fake gauge")
    assert metrics["content-type"].startswith("text/plain; version=0.0.4")


def test_a_wrong_method_on_a_page_of_ours_is_405(app):
    answer = app.ask("POST", "/-/healthz")
    assert answer.status == 405
    assert "GET" in answer["allow"]
    assert answer["x-request-id"]


@pytest.mark.parametrize("target", ["/-%2fmetrics", "/%2d/metrics", "/-%2Fhealthz"])
def test_a_page_has_one_spelling(app, target):
    assert app.ask(target=target).text == "ok"
    assert app.link.asked[0].call.raw_path == target.encode(), "it is a query like any other"


@pytest.mark.parametrize("target", ["/-/none", "/-/%6detrics", "/-/healthz/", "/-/"])
def test_nothing_of_users_is_where_our_pages_are(app, target):
    assert app.ask(target=target).status == 404
    assert not app.link.asked


def test_a_router_that_does_not_answer_makes_a_page_503(app, monkeypatch):
    monkeypatch.setattr("greenroom.http_front.pages.PAGE_TIMEOUT_S", 0.01)
    app.link.routes = lambda: asyncio.sleep(PAGE_TIMEOUT_S * 100)
    answer = app.ask(target="/-/routes")
    assert (answer.status, answer["retry-after"]) == (503, "1")


def test_a_link_that_cannot_start_or_stop_ends_nothing(app, caplog):
    async def fail():
        raise OSError("no router")

    async def live():
        await app.front.start()
        await app.front.stop()

    asyncio.run(live())
    assert (app.link.started, app.link.stopped) == (True, True)
    app.link.start = app.link.stop = fail
    asyncio.run(live())
    assert caplog.text.count("OSError: no router") == 2


def test_an_empty_segment_is_taken_where_a_setting_allows_it(app):
    assert app.ask(target="/a//b").status == 400
    assert app.rebuild(empty_path_segments=True).ask(target="/a//b").status == 200
    assert app.ask(target="/a//../b").status == 400
