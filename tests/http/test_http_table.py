"""What a client gets for each way a query can end: the rows of the HTTP table."""

import asyncio

import pytest

from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer
from greenroom.core.errors import BackPressureError
from greenroom.http_front.app import PAGE_TIMEOUT_S

HOST = (b"host", b"test")
WANTS_JSON = (HOST, (b"accept", b"application/json"))


def failing(kind, text="why", **fields):
    return lambda asked: FailedAnswer(0, kind, text, **fields)


def test_an_answer_passes_with_its_status_headers_and_body(app):
    app.dispatcher.handler = lambda asked: HttpAnswer(0, 201, ((b"X-Made", b"here"),), b"new")
    answer = app.ask("POST", "/things")
    assert (answer.status, answer["x-made"], answer.body) == (201, "here", b"new")
    assert answer["content-length"] == "3"


def test_an_unknown_route_is_404_and_says_where_the_routes_are(app):
    app.dispatcher.handler = failing("RouteNotFoundError")
    answer = app.ask(path="/nowhere")
    expected = "Path '/nowhere' not found. Ping /-/routes for available routes."
    assert (answer.status, answer.text) == (404, expected)
    assert answer["content-type"].startswith("text/plain")


def test_a_wrong_method_is_405_with_the_allowed_ones(app):
    app.dispatcher.handler = failing("MethodNotAllowedError", allowed=("GET", "POST"))
    answer = app.ask("DELETE")
    assert (answer.status, answer["allow"]) == (405, "GET, POST")


def test_a_query_past_its_deadline_is_408(app):
    app.dispatcher.handler = failing("QueryTimeoutError")
    assert app.ask().status == 408


@pytest.mark.parametrize(
    ("kind", "retry_after_s", "header"),
    [
        ("BackPressureError", None, "1"),
        ("ReplicaUnavailableError", None, "1"),
        ("DeploymentUnavailableError", None, "5"),
        ("NotRunningError", None, "1"),
        ("BackPressureError", 0.01, "1"),
        ("BackPressureError", 2.1, "3"),
    ],
)
def test_a_query_that_nobody_can_take_is_503_with_whole_seconds_to_wait(
    app, kind, retry_after_s, header
):
    app.dispatcher.handler = failing(kind, retry_after_s=retry_after_s)
    answer = app.ask()
    assert (answer.status, answer["retry-after"]) == (503, header)
    assert "why" in answer.text


@pytest.mark.parametrize("headers", [(HOST,), WANTS_JSON])
def test_an_exception_in_user_code_is_500_with_the_request_id_and_no_traceback(app, headers):
    text = "ValueError: boom\nTraceback (most recent call last):\n  File secret.py"
    app.dispatcher.handler = failing("UserCodeError", text, traceback="Traceback: secret.py")
    answer = app.ask(headers=headers)
    assert answer.status == 500
    assert answer["x-request-id"] in answer.text
    assert "boom" in answer.text
    assert "Traceback" not in answer.text
    assert "secret" not in answer.text


def test_an_error_is_json_for_a_client_that_asks_for_it(app):
    app.dispatcher.handler = failing("UserCodeError", "ValueError: boom")
    answer = app.ask(headers=WANTS_JSON)
    assert answer["content-type"] == "application/json"
    assert answer.json == {
        "error": "UserCodeError",
        "message": "ValueError: boom",
        "request_id": answer["x-request-id"],
    }


def test_a_kind_of_error_that_is_not_known_here_is_500(app):
    app.dispatcher.handler = failing("FromTheFutureError")
    assert app.ask().status == 500


def test_an_error_of_ours_raised_by_the_dispatcher_is_answered_by_its_status(app):
    def refuse(asked):
        raise BackPressureError("full")

    app.dispatcher.handler = refuse
    answer = app.ask()
    assert (answer.status, answer["retry-after"]) == (503, "1")


def test_any_other_error_of_the_dispatcher_is_500_without_its_text(app, caplog):
    def break_down(asked):
        raise RuntimeError("secret")

    app.dispatcher.handler = break_down
    answer = app.ask()
    assert answer.status == 500
    assert answer["x-request-id"] in answer.text
    assert "secret" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("own", "value", "timeout_s"),
    [(None, b"1e2", 100), (7, b"0.5", 0.5), (7, b"3", 3), (7, b"1e2", 7)],
)
def test_the_timeout_header_shortens_the_servers_and_never_lengthens_it(app, own, value, timeout_s):
    app.rebuild(request_timeout_s=own)
    app.ask(headers=(HOST, (b"x-request-timeout-seconds", value)))
    assert app.dispatcher.asked[0].timeout_s == timeout_s


@pytest.mark.parametrize("value", [b"soon", b"0", b"-1", b"nan", b"inf", b""])
def test_a_bad_timeout_header_is_400_naming_header_and_value(app, value):
    answer = app.ask(headers=(HOST, (b"x-request-timeout-seconds", value)))
    assert answer.status == 400
    assert "X-Request-Timeout-Seconds" in answer.text
    assert repr(value.decode()) in answer.text
    assert not app.dispatcher.asked


def test_without_the_header_the_timeout_is_the_servers(app):
    app.ask()
    app.rebuild(request_timeout_s=7).ask()
    assert [asked.timeout_s for asked in app.dispatcher.asked] == [None, 7]


@pytest.mark.parametrize(
    ("sent", "key"), [(b"k", "k"), (b"k\xc3\xa4", "k\xe4"), (b"k\xe4", "k\xe4"), (b"", "")]
)
def test_a_shard_key_is_read_as_utf_8_or_else_as_latin_1(app, sent, key):
    app.ask(headers=(HOST, (b"x-serve-shard-key", sent)))
    assert app.dispatcher.asked[-1].shard_key == key


def test_a_model_id_is_passed_on_and_no_other_header_with_an_underscore(app):
    model = (b"serve_multiplexed_model_id", "grün".encode())
    app.ask(headers=(HOST, model, (b"x_serve_shard_key", b"k")))
    asked = app.dispatcher.asked[-1]
    assert (asked.multiplexed_model_id, asked.shard_key) == ("grün", None)
    assert asked.call.headers == (HOST, model)
    app.ask(headers=(HOST,))
    assert app.dispatcher.asked[-1].multiplexed_model_id == ""


def test_shard_key_and_call_method_are_passed_on(app):
    app.ask(headers=(HOST, (b"x-serve-shard-key", b"k\xe4"), (b"x-serve-call-method", b"train")))
    app.ask(headers=(HOST, (b"x-serve-call-method", b"__call__")))
    app.ask(headers=(HOST, (b"x-serve-call-method", "größe".encode())))
    app.ask(headers=(HOST,))
    asked = [(each.shard_key, each.call_method) for each in app.dispatcher.asked]
    assert asked == [("kä", "train"), (None, "__call__"), (None, "größe"), (None, "")]


def test_two_call_methods_are_refused_for_a_proxy_may_have_checked_the_other(app):
    header = b"x-serve-call-method"
    answer = app.ask(headers=(HOST, (header, b"public"), (header, b"other")))
    assert (answer.status, "given 2 times" in answer.text) == (400, True)
    assert not app.dispatcher.asked


@pytest.mark.parametrize("value", [b"__init__", b"_private", b"no method", b"", b"reconfigure"])
def test_a_method_that_is_not_public_cannot_be_called(app, value):
    answer = app.ask(headers=(HOST, (b"x-serve-call-method", value)))
    assert answer.status == 400
    assert repr(value.decode()) in answer.text
    assert not app.dispatcher.asked


def test_health_is_success_once_there_is_a_route_table(app):
    app.dispatcher.ready = False
    unready = app.ask(path="/-/healthz")
    app.dispatcher.ready = True
    ready = app.ask(path="/-/healthz")
    assert (unready.status, unready["retry-after"]) == (503, "1")
    assert (ready.status, ready.body) == (200, b"success")


def test_readiness_names_the_applications_that_cannot_serve(app):
    assert (app.ask(path="/-/readyz").status, app.ask(path="/-/readyz").body) == (200, b"ready")
    app.dispatcher.missed = {
        "shop#Tax": ("shop#Tax#2c0ffee",),
        "shop#Shop": ("shop#Shop",),
        "plain": ("plain:v1", "plain:v2"),
        "lost#Lost": (),
    }
    unready = app.ask(path="/-/readyz")
    assert (unready.status, unready["retry-after"]) == (503, "1")
    assert unready.text.startswith(
        "cannot serve: application 'shop' (no replica of Tax, Shop); "
        "endpoint 'plain' (no replica of plain:v1, plain:v2); "
        "application 'lost' (its record is damaged)\n"
    )
    assert app.ask(path="/-/healthz").status == 200, "this worker can take queries"
    app.dispatcher.missed = None
    assert "no route table yet" in app.ask(path="/-/readyz").text
    app.dispatcher.missed, app.dispatcher.ready = {}, False
    assert app.ask(path="/-/readyz").status == 503


def test_while_draining_health_and_new_queries_are_503_and_the_connection_closes(app):
    app.front.draining = True
    for path in ("/-/healthz", "/-/readyz", "/"):
        answer = app.ask(path=path)
        assert (answer.status, answer["retry-after"], answer["connection"]) == (503, "1", "close")
    assert not app.dispatcher.asked


def test_routes_are_json_and_metrics_are_prometheus_text(app):
    routes, metrics = app.ask(path="/-/routes"), app.ask(path="/-/metrics")
    assert (routes.json, routes["content-type"]) == ({"/": "echo"}, "application/json")
    assert metrics.body.startswith(b"# TYPE greenroom_fake gauge")
    assert metrics["content-type"].startswith("text/plain; version=0.0.4")


def test_a_wrong_method_on_a_page_of_ours_is_405(app):
    answer = app.ask("POST", "/-/healthz")
    assert answer.status == 405
    assert "GET" in answer["allow"]
    assert answer["x-request-id"]


def test_a_router_that_does_not_answer_makes_a_page_503(app, monkeypatch):
    monkeypatch.setattr("greenroom.http_front.app.PAGE_TIMEOUT_S", 0.01)
    app.dispatcher.routes = lambda: asyncio.sleep(PAGE_TIMEOUT_S * 100)
    answer = app.ask(path="/-/routes")
    assert (answer.status, answer["retry-after"]) == (503, "1")


def test_an_id_made_here_is_never_made_twice(app):
    ids = {app.ask()["x-request-id"] for _ in range(100)}
    assert len(ids) == 100


@pytest.mark.parametrize("offered", [b"abc", b"a b/c~", b"x" * 200])
def test_a_clients_request_id_is_taken_over_and_echoed(app, offered):
    answer = app.ask(headers=(HOST, (b"x-request-id", offered)))
    assert answer["x-request-id"] == app.dispatcher.asked[0].request_id == offered.decode()


@pytest.mark.parametrize("offered", [b"", b"x" * 201, b"\xff", b"a\tb"])
def test_an_unfit_request_id_is_replaced(app, offered):
    answer = app.ask(headers=(HOST, (b"x-request-id", offered)))
    assert answer["x-request-id"] == app.dispatcher.asked[0].request_id
    assert answer["x-request-id"].encode() != offered


def test_the_lifespan_starts_and_stops_the_dispatcher_even_when_it_fails(app, caplog):
    async def fail():
        raise OSError("no router")

    async def live():
        events = iter(["lifespan.startup", "lifespan.shutdown"])
        sent = []

        async def receive():
            return {"type": next(events)}

        async def send(event):
            sent.append(event["type"])

        await app.front({"type": "lifespan"}, receive, send)
        return sent

    both = ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert asyncio.run(live()) == both
    assert app.dispatcher.started
    assert app.dispatcher.stopped
    app.dispatcher.start = app.dispatcher.stop = fail
    assert asyncio.run(live()) == both
    assert "no router" in caplog.text
