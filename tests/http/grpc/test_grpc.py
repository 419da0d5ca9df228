"""gRPC, as clients with generated stubs see it, on one running system."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc

from greenroom import serve
from greenroom.actors.messages.queries import FailedAnswer, ValueAnswer
from greenroom.http_front.clients import TrustedProxies
from greenroom.http_front.grpc.calls import INFERENCE, Applications, Places, Servicers
from greenroom.http_front.grpc.serving import CONNECTION, Services
from greenroom.serve.admin import applications
from greenroom.serve.exceptions import BackPressureError, GrpcStatusError, StartError
from tests.support.certificates import certificate
from tests.support.programs import python
from tests.support.systems import RunningSystem, alive, free_port, wait_until

pytestmark = pytest.mark.anyio

PROTO = """
syntax = "proto3";
package shop;
message Item { string name = 1; int32 number = 2; }
service Shop {
  rpc Price (Item) returns (Item);
  rpc Count (Item) returns (stream Item);
  rpc Total (stream Item) returns (Item);
  rpc Echo (stream Item) returns (stream Item);
  rpc Missing (Item) returns (Item);
}
"""
CODE = grpc.StatusCode
MIB = 1024 * 1024
ERRORS = {
    "own": GrpcStatusError("NOT_FOUND", "no such item: x"),
    "busy": BackPressureError("all are busy"),
    "broken": LookupError("secret"),
}


@serve.deployment(max_ongoing_requests=50)
class Shop:
    def __init__(self) -> None:
        self.log: list[str] = []

    def Price(self, item):
        if item.name in ERRORS:
            raise ERRORS[item.name]
        if item.name == "context":
            context = serve.get_request_context()
            text = f"{context.request_id} {context.multiplexed_model_id} {context.app_name}"
            return type(item)(name=text, number=round(context.remaining_s or -1))
        if item.name == "log":
            return type(item)(name=",".join(self.log))
        return type(item)(name=item.name, number=item.number * 2)

    async def Count(self, item):
        try:
            for number in range(item.number):
                yield type(item)(name=item.name, number=number)
                if item.name == "slow":
                    await asyncio.sleep(0.01)
            if item.name in ERRORS:
                raise ERRORS[item.name]
        finally:
            self.log.append(f"counted {item.name}")

    async def Total(self, items):
        total = 0
        async for item in items:
            total += item.number
        return type(item)(name="total", number=total)

    async def Echo(self, items):
        try:
            async for item in items:
                yield type(item)(name=item.name.upper(), number=item.number)
        finally:
            self.log.append("echoed")


class Running:
    def __init__(self, system, port, stubs, pb2):
        self.system = system
        self.target = f"127.0.0.1:{port}"
        self.stubs = stubs
        self.pb2 = pb2

    def status(self):
        return self.system.status()["hosts"][0]["grpc"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "shop.proto").write_text(PROTO)
    out = [f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main(["protoc", *out, str(folder / "shop.proto")]) == 0
    sys.path.insert(0, str(folder))
    port = free_port()
    system = RunningSystem(
        folder / "state",
        GREENROOM_GRPC_PORT=str(port),
        GREENROOM_GRPC_SERVICER_FUNCTIONS="shop_pb2_grpc.add_ShopServicer_to_server",
        GREENROOM_GRPC_DIR=str(folder),
        GREENROOM_GRPC_MAX_RECEIVE_MESSAGE_LENGTH=str(5 * MIB),
        GREENROOM_GRPC_REQUEST_TIMEOUT_S="50",
        GREENROOM_GRPC_MAXIMUM_CONCURRENT_RPCS="20",
    )
    system.start()
    try:
        system.deploy(
            Shop.bind(),
            name="shop",
            runtime_env={"env_vars": {"X": "1"}, "working_dir": str(folder)},
            route_prefix=None,
        )
        stubs = importlib.import_module("shop_pb2_grpc")
        yield Running(system, port, stubs, importlib.import_module("shop_pb2"))
    finally:
        sys.path.remove(str(folder))
        system.stop()


@pytest.fixture
def channel(running):
    with grpc.insecure_channel(running.target) as channel:
        yield channel


@pytest.fixture
def shop(running, channel):
    return running.stubs.ShopStub(channel)


@pytest.fixture
def item(running):
    return running.pb2.Item


def log(shop, item):
    return shop.Price(item(name="log")).name.split(",")


def test_all_four_kinds_of_calls(shop, item):
    assert shop.Price(item(name="salt", number=3)).number == 6
    assert [each.number for each in shop.Count(item(number=500))] == list(range(500))
    assert shop.Total(iter([item(number=n) for n in range(1000)])).number == 499_500
    echoed = shop.Echo(iter([item(name=name) for name in "abc"]))
    assert [each.name for each in echoed] == ["A", "B", "C"]


def test_a_stream_is_answered_while_it_goes_on(shop, item):
    heard = threading.Semaphore(0)

    def talk():
        for number in range(20):
            yield item(name="x", number=number)
            assert heard.acquire(timeout=20)

    for number, each in enumerate(shop.Echo(talk())):
        assert each.number == number
        heard.release()


def test_large_messages_of_a_stream_arrive_whole(shop, item):
    names = ["X" * 3_000_000, "", "Y" * 100_000]
    echoed = shop.Echo(iter([item(name=name) for name in names]))
    assert [each.name for each in echoed] == names


def test_metadata_says_model_request_and_deadline(shop, item):
    metadata = (("request_id", "r1"), ("multiplexed_model_id", "m1"), ("application", "shop"))
    answer, call = shop.Price.with_call(item(name="context"), metadata=metadata, timeout=30)
    assert answer.name == "r1 m1 shop"
    assert 25 <= answer.number <= 30
    assert ("request_id", "r1") in call.trailing_metadata()


WRONG = [
    ("own", CODE.NOT_FOUND, "no such item: x"),
    ("busy", CODE.RESOURCE_EXHAUSTED, "all are busy"),
    ("broken", CODE.INTERNAL, "the deployment raised an exception"),
]


@pytest.mark.parametrize(("name", "code", "details"), WRONG)
def test_errors_have_a_status(shop, item, name, code, details):
    with pytest.raises(grpc.RpcError) as caught:
        shop.Price(item(name=name))
    assert (caught.value.code(), caught.value.details()) == (code, details)
    with pytest.raises(grpc.RpcError) as caught:
        list(shop.Count(item(name=name, number=2)))
    assert (caught.value.code(), caught.value.details()) == (code, details)


def test_what_is_not_there_has_a_status(shop, item, channel):
    def code_of(call, **options):
        with pytest.raises(grpc.RpcError) as caught:
            call(item(name="salt"), **options)
        return caught.value.code()

    assert code_of(shop.Missing) is CODE.INVALID_ARGUMENT
    assert code_of(shop.Price, metadata=(("application", "none"),)) is CODE.NOT_FOUND
    assert code_of(shop.Price, metadata=(("application", "n" * 300),)) is CODE.INVALID_ARGUMENT
    unknown = channel.unary_unary("/shop.Shop/Unknown", item.SerializeToString, item.FromString)
    assert code_of(unknown) is CODE.UNIMPLEMENTED
    garbage = channel.unary_unary("/shop.Shop/Price", lambda _: b"\xff\xff", item.FromString)
    assert code_of(garbage) is not CODE.OK


@serve.deployment
class Other:
    def Missing(self, item):
        return type(item)(name="other", number=1)


def test_of_several_applications_one_with_the_method_answers_and_streams_name_theirs(
    running, shop, item
):
    options = {"runtime_env": {"working_dir": str(Path(running.system.settings.state_dir).parent)}}
    running.system.deploy(Other.bind(), name="other", route_prefix="/other", **options)
    try:
        wait_until(lambda: named(shop.Missing, item) == "other", 5, "the new one is known")
        assert named(shop.Price, item) == "salt"
        to_shop = (("application", "shop"),)
        assert len(list(shop.Count(item(name="salt", number=3), metadata=to_shop))) == 3
        for ask in (
            lambda it: list(shop.Count(it)),
            lambda it: list(shop.Echo(iter([it]))),
            lambda it: shop.Total(iter([it])),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask(item(name="salt", number=3))
            assert caught.value.code() is CODE.NOT_FOUND
            assert "metadata=[('application', NAME)]; there are: other, shop" in str(caught.value)
    finally:
        assert applications.delete(running.system.connection, "other")
        wait_until(lambda: named(shop.Missing, item) is CODE.INVALID_ARGUMENT, 5, "that is known")


def named(call, item):
    try:
        return call(item(name="salt", number=3)).name
    except grpc.RpcError as error:
        return error.code()


def test_a_deadline_ends_the_call_and_the_generator(shop, item):
    def is_closed():
        with pytest.raises(grpc.RpcError) as caught:
            list(shop.Count(item(name="slow", number=100_000), timeout=0.3))
        assert caught.value.code() is CODE.DEADLINE_EXCEEDED
        return "counted slow" in log(shop, item)

    wait_until(is_closed, 5, "a generator that began before its deadline is closed")


def test_a_client_that_cancels_closes_the_generator(shop, item):
    before = log(shop, item).count("counted slow")
    call = shop.Count(item(name="slow", number=100_000))
    assert next(call).number == 0
    call.cancel()
    wait_until(lambda: log(shop, item).count("counted slow") > before, 5, "it is closed")
    echoed = log(shop, item).count("echoed")
    gone = threading.Event()

    def silent():
        yield item(name="x")
        gone.wait(60)

    call = shop.Echo(silent())
    assert next(call).name == "X"
    call.cancel()
    gone.set()
    wait_until(lambda: log(shop, item).count("echoed") > echoed, 5, "it is closed")


def test_health_and_reflection(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "shop.Shop", "ray.serve.RayServeAPIService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    [answer] = stub.ServerReflectionInfo(iter([asked]))
    names = {each.name for each in answer.list_services_response.service}
    assert {"shop.Shop", "ray.serve.RayServeAPIService"} <= names


def test_rays_api_service(channel):
    def ask(method):
        return channel.unary_unary(f"/ray.serve.RayServeAPIService/{method}")(b"")

    # Each has one field, a string, with the number 1.
    assert ask("ListApplications") == b"\x0a\x04shop"
    assert ask("Healthz") == b"\x0a\x07success"


RAYS_PROTO = """
syntax = "proto3";
package ray.serve;
message ListApplicationsRequest {}
message ListApplicationsResponse { repeated string application_names = 1; }
message HealthzRequest {}
message HealthzResponse { string message = 1; }
service RayServeAPIService {
  rpc ListApplications (ListApplicationsRequest) returns (ListApplicationsResponse);
  rpc Healthz (HealthzRequest) returns (HealthzResponse);
}
"""
STARTED = """
import asyncio, types, grpc, serve_pb2
from greenroom.http_front.grpc.serving import Services
async def start():
    names = types.SimpleNamespace(names=())
    Services(grpc.aio.server(), names, None, None, has_reflection=True)
asyncio.run(start())
"""


@pytest.mark.slow
def test_servicers_may_import_rays_own_messages(tmp_path):
    (tmp_path / "serve.proto").write_text(RAYS_PROTO)
    out = [f"-I{tmp_path}", f"--python_out={tmp_path}"]
    assert protoc.main(["protoc", *out, str(tmp_path / "serve.proto")]) == 0
    python("-c", STARTED, PYTHONPATH=str(tmp_path))


def test_messages_and_calls_have_the_limits_of_the_settings(running, shop, item):
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(running.target, unlimited) as channel:
        answer = running.stubs.ShopStub(channel).Price(item(name="x" * (4 * MIB + 1)))
    assert len(answer.name) == 4 * MIB + 1
    with pytest.raises(grpc.RpcError) as caught:
        shop.Price(item(name="x" * (5 * MIB)))
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    assert 45 < shop.Price(item(name="context")).number <= 50
    assert shop.Price(item(name="context"), timeout=20).number <= 20


def test_a_client_with_every_place_leaves_health_to_others(running, shop, item):
    ends = threading.Event()

    def asked():
        yield item(name="held")
        ends.wait(30)

    streams = [shop.Echo(asked()) for _ in range(20)]
    try:
        assert [next(stream).name for stream in streams] == ["HELD"] * 20
        with grpc.insecure_channel(running.target) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                running.stubs.ShopStub(channel).Price(item(name="salt"))
            assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
            assert "maximum_concurrent_rpcs" in caught.value.details()
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        ends.set()
    assert [list(stream) for stream in streams] == [[]] * 20
    assert shop.Price(item(name="salt", number=1)).number == 2


def test_a_connection_has_few_watches_of_health(running, channel):
    watch = health_pb2_grpc.HealthStub(channel).Watch
    begun = [watch(health_pb2.HealthCheckRequest()) for _ in range(10)]
    assert all(next(each).status == health_pb2.HealthCheckResponse.SERVING for each in begun)
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(health_pb2.HealthCheckRequest()))
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(running.target, [("grpc.use_local_subchannel_pool", 1)]) as other:
        next(health_pb2_grpc.HealthStub(other).Watch(health_pb2.HealthCheckRequest()))
    begun.pop().cancel()
    wait_until(lambda: _is_watched(watch), 10, "a watch that ended gives its place back")
    for each in begun:
        each.cancel()


class Context:
    """An RPC of a client, as far as places go."""

    def __init__(self, peer):
        self._peer = peer

    def peer(self):
        return self._peer

    async def abort(self, code, text):
        raise RuntimeError(code, text)

    def invocation_metadata(self):
        return ()

    def set_trailing_metadata(self, _metadata):
        pass

    def time_remaining(self):
        return None

    def code(self):
        return None


async def test_a_client_has_its_share_of_places_over_all_its_connections_and_a_proxy_any():
    places = Places(8, TrustedProxies(["10.0.0.9"]))
    async with contextlib.AsyncExitStack() as stack:

        async def take(peer):
            await stack.enter_async_context(places.place(Context(peer), "calls"))

        for port in (1, 2):
            await take(f"ipv4:10.0.0.1:{port}")
        with pytest.raises(RuntimeError, match="2 calls of this client") as caught:
            await take("ipv4:10.0.0.1:3")
        assert caught.value.args[0] is CODE.RESOURCE_EXHAUSTED
        for peer in ("ipv6:%5B2001:db8::1%5D:1", "ipv6:%5B2001:db8::2%5D:1"):
            await take(peer)
        with pytest.raises(RuntimeError, match="of this client"):
            await take("ipv6:%5B2001:db8::3%5D:1")
        for port in range(4):
            await take(f"ipv4:10.0.0.9:{port}")
        with pytest.raises(RuntimeError, match="8 calls are under way"):
            await take("ipv4:10.0.0.9:9")
    async with places.place(Context("ipv4:10.0.0.1:1"), "calls"):
        pass


class Two:
    """A link to two applications, of which the second one has all models; keeps who is asked."""

    def __init__(self):
        self.asked = []
        self.next_id = itertools.count(1).__next__

    async def request(self, *_):
        names = ("one", "two")
        return {"applications": {name: {"ingress": "D", "deployments": {}} for name in names}}

    async def ask(self, query, _on_upload=None):
        self.asked.append(query.endpoint)
        if query.endpoint == "one#D":
            return FailedAnswer(query.id, "GrpcStatusError", "NOT_FOUND: no such model")
        return ValueAnswer(query.id, pickle.dumps("found"))


@pytest.mark.parametrize(("size", "again"), [(10, ["two#D"]), (1_000_000, ["one#D", "two#D"])])
async def test_who_has_a_model_is_remembered_unless_its_name_is_of_any_length(size, again):
    link = Two()
    servicers = Servicers(link, Applications(link), None, Places(8, TrustedProxies([])))
    method = {"ModelInfer": grpc.unary_unary_rpc_method_handler(None)}
    servicers.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, method),))
    details = SimpleNamespace(method=f"/{INFERENCE}/ModelInfer", invocation_metadata=())
    infer = servicers.service(details).unary_unary
    request = SimpleNamespace(model_name="m" * size)
    assert await infer(request, Context("ipv4:10.0.0.1:1")) == "found"
    assert link.asked == ["one#D", "two#D"]
    assert await infer(request, Context("ipv4:10.0.0.1:1")) == "found"
    assert link.asked[2:] == again


def _shortened():
    """Return the options of connections, with durations a thousandth as long."""
    return [(name, value // 1000 if name.endswith("_ms") else value) for name, value in CONNECTION]


@contextlib.asynccontextmanager
async def peers_served():
    """Serve calls that answer with their connection's peer; give a channel to them."""

    async def peer(_request, context):
        return context.peer().encode()

    async def stream(request, context):
        yield context.peer().encode()
        await ended.wait()
        yield b"the end"

    ended = asyncio.Event()
    server = grpc.aio.server(options=_shortened())
    handlers = {
        "Peer": grpc.unary_unary_rpc_method_handler(peer),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, ended
    await server.stop(0)


async def test_a_connection_without_calls_is_closed_after_a_time():
    async with peers_served() as (channel, _):
        await channel.unary_unary("/a.B/Peer")(b"")
        while (state := channel.get_state()) is not grpc.ChannelConnectivity.IDLE:
            await channel.wait_for_state_change(state)
        assert await channel.unary_unary("/a.B/Peer")(b"")


async def test_an_old_connection_is_left_for_another_and_its_calls_are_finished():
    async with peers_served() as (channel, ended):
        call = channel.unary_stream("/a.B/Stream")(b"")
        first = await call.read()
        while await channel.unary_unary("/a.B/Peer")(b"") == first:
            await asyncio.sleep(0.05)
        ended.set()
        assert await call.read() == b"the end"


def test_reflection_can_be_switched_off():
    async def run(has_reflection):
        server = grpc.aio.server()
        proxies = TrustedProxies([])
        servicers = Servicers(None, None, None, Places(8, proxies))
        Services(server, servicers, None, Places(8, proxies), has_reflection=has_reflection)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                asked = reflection_pb2.ServerReflectionRequest(list_services="")
                answer = await stub.ServerReflectionInfo(iter([asked])).read()
                return len(answer.list_services_response.service)
        except grpc.RpcError as error:
            return error.code()
        finally:
            await server.stop(0)

    assert asyncio.run(run(True)) == 3
    assert asyncio.run(run(False)) is CODE.UNIMPLEMENTED


def _is_watched(watch):
    try:
        next(watch(health_pb2.HealthCheckRequest()))
    except grpc.RpcError:
        return False
    return True


def test_calls_are_counted_by_method_and_status(running, shop, item):
    shop.Price(item(name="salt"))
    with pytest.raises(grpc.RpcError):
        shop.Price(item(name="own"))

    def counted():
        page = urllib.request.urlopen(f"{running.system.url}/-/metrics").read().decode()
        lines = [each for each in page.splitlines() if each.startswith("greenroom_grpc_requests_")]
        codes = ("OK", "NOT_FOUND")
        return all(
            any('method="Price"' in each and f'code="{code}"' in each for each in lines)
            for code in codes
        )

    wait_until(counted, 10, "both are counted")


@pytest.mark.slow
def test_the_server_has_the_certificate_of_https_and_asks_for_one_of_clients(tmp_path):
    made = certificate(tmp_path, "localhost")
    port = free_port()
    system = RunningSystem(
        tmp_path / "state",
        GREENROOM_GRPC_PORT=str(port),
        GREENROOM_HTTP_SSL_KEYFILE=str(made.key),
        GREENROOM_HTTP_SSL_CERTFILE=str(made.certificate),
        GREENROOM_GRPC_SSL_CA_CERTS=str(made.ca),
    )
    system.start()
    try:
        own = made.key.read_bytes(), made.certificate.read_bytes()
        trusted = grpc.ssl_channel_credentials(made.ca.read_bytes(), *own)
        stranger = grpc.ssl_channel_credentials(made.ca.read_bytes())
        name = (("grpc.ssl_target_name_override", "localhost"),)
        with grpc.secure_channel(f"127.0.0.1:{port}", trusted, name) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for channel in (
            grpc.secure_channel(f"127.0.0.1:{port}", stranger, name),
            grpc.insecure_channel(f"127.0.0.1:{port}"),
        ):
            with channel, pytest.raises(grpc.RpcError):
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        system.stop()


@pytest.mark.slow
def test_a_start_says_which_servicer_cannot_be_imported(tmp_path):
    system = RunningSystem(
        tmp_path / "state",
        GREENROOM_GRPC_PORT=str(free_port()),
        GREENROOM_GRPC_SERVICER_FUNCTIONS="nonesuch.add_servicer",
    )
    text = "grpc_servicer_functions='nonesuch.add_servicer': cannot be imported: ModuleNotFound"
    with pytest.raises(StartError, match=text):
        system.start()


def test_a_port_in_use_is_reported_before_anything_is_started(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        system = RunningSystem(tmp_path / "state", GREENROOM_GRPC_PORT=str(port))
        message = f"gRPC port {port} on 127.0.0.1 is in use by pid {os.getpid()} .*--grpc-port"
        with pytest.raises(StartError, match=message):
            system.start()
    assert not (system.settings.logs_dir / "front.log").exists()


def test_calls_go_on_when_a_proxy_or_a_replica_is_killed(running, shop, item):
    server, seen = running.status()["pid"], set()
    for victim in (running.system.pid_of("proxy"), *running.system.replica_pids("shop")):
        os.kill(victim, signal.SIGKILL)

        def answers():
            try:
                return shop.Price(item(name="salt", number=4), timeout=10).number == 8
            except grpc.RpcError as error:
                seen.add(error.code())
                return False

        wait_until(answers, 10, "calls are answered again")
    assert seen <= {CODE.UNAVAILABLE, CODE.DEADLINE_EXCEEDED}
    assert running.status()["pid"] == server


@pytest.mark.slow
def test_a_killed_server_comes_back(running, shop, item):
    pid = running.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    answer = shop.Price(item(name="salt", number=4), wait_for_ready=True, timeout=60)
    assert answer.number == 8
    wait_until(lambda: running.status()["pid"] not in {None, pid}, 10, "status shows another")


def test_a_stop_finishes_calls_and_leaves_nothing(running, channel, shop, item):
    pid = running.status()["pid"]
    calls = shop.Count(item(name="slow", number=100))
    assert next(calls).number == 0
    began = time.monotonic()
    stopping = threading.Thread(target=running.system.stop)
    stopping.start()
    assert [each.number for each in calls] == list(range(1, 100))
    stopping.join(60)
    assert not alive(pid)
    assert time.monotonic() - began < 60
