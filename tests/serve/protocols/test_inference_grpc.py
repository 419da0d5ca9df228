"""serve.inference over gRPC, through Triton's client."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from greenroom import serve
from greenroom.serve.admin import applications
from tests.support.systems import RunningSystem, free_port, wait_until

FUNCTION = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"


@serve.deployment
@serve.inference(
    inputs={"rows": ("FP32", [-1, 2]), "label": ("BYTES", [1])},
    outputs={"sums": ("FP32", [-1]), "told": ("BYTES", [-1])},
    name="summing",
)
class Summing:
    async def infer(self, inputs):
        sums = inputs["rows"].sum(axis=1)
        if inputs["label"][0] == b"break":
            raise LookupError("secret")
        return {"sums": sums, "told": [inputs["label"][0]] * len(sums)}


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    system = RunningSystem(
        tmp_path_factory.mktemp("inference-grpc") / "state",
        GREENROOM_GRPC_PORT=str(free_port()),
        GREENROOM_GRPC_SERVICER_FUNCTIONS=FUNCTION,
    )
    system.start()
    try:
        system.deploy(Summing.bind())
        yield system
    finally:
        system.stop()


@pytest.fixture
def target(system):
    return f"127.0.0.1:{system.settings.grpc_port}"


@pytest.fixture
def client(target):
    with triton.InferenceServerClient(target) as client:
        yield client


def asked(rows, label="sum"):
    tensors = {"rows": ("FP32", np.array(rows, np.float32)), "label": ("BYTES", [label])}
    inputs = []
    for name, (datatype, values) in tensors.items():
        array = np.array(values, np.object_) if datatype == "BYTES" else values
        made = triton.InferInput(name, array.shape, datatype)
        made.set_data_from_numpy(array)
        inputs.append(made)
    return inputs


def test_a_model_answers(client):
    result = client.infer("summing", asked([[1, 2], [3, 4]]), request_id="mine")
    assert result.as_numpy("sums").tolist() == [3.0, 7.0]
    assert result.as_numpy("told").tolist() == [b"sum", b"sum"]
    assert (result.get_response().id, result.get_response().model_version) == ("mine", "1")
    only = client.infer("summing", asked([[1, 2]]), outputs=[triton.InferRequestedOutput("sums")])
    assert only.as_numpy("told") is None


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("summing", "1")
    assert client.get_server_metadata().name == "greenroom"
    about = client.get_model_metadata("summing")
    assert [(each.name, each.datatype, list(each.shape)) for each in about.inputs] == [
        ("rows", "FP32", [-1, 2]),
        ("label", "BYTES", [1]),
    ]


def test_typed_contents_are_taken_too(target):
    request = service_pb2.ModelInferRequest(model_name="summing")
    rows = request.inputs.add(name="rows", datatype="FP32", shape=[1, 2])
    rows.contents.fp32_contents.extend([1.5, 2])
    label = request.inputs.add(name="label", datatype="BYTES", shape=[1])
    label.contents.bytes_contents.append(b"\xff")
    with grpc.insecure_channel(target) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        request.inputs[0].shape[:] = [2, 2]
        with pytest.raises(grpc.RpcError, match="has 2 values") as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3.5]
    assert answer.raw_output_contents[1] == b"\x01\0\0\0\xff"
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_wrong_requests_have_a_status(client):
    def refused(code, text, *call):
        with pytest.raises(InferenceServerException, match=text) as caught:
            client.infer(*call)
        assert caught.value.status() == f"StatusCode.{code}"

    refused("NOT_FOUND", "no model 'none'", "none", asked([[1, 2]]))
    refused("NOT_FOUND", "no version '7'", "summing", asked([[1, 2]]), "7")
    refused("INVALID_ARGUMENT", "must be .-1, 2.", "summing", asked([[1, 2, 3]]))
    refused("INVALID_ARGUMENT", "label: missing", "summing", asked([[1, 2]])[:1])
    refused("INTERNAL", "raised an exception", "summing", asked([[1, 2]], "break"))
    wrong = asked([[1, 2]])
    wrong[0].set_shape([2, 2])
    refused("INVALID_ARGUMENT", "needs 16 bytes", "summing", wrong)


# --- Several applications -------------------------------------------------------------------------


@serve.deployment
@serve.inference(inputs={"x": ("FP32", [-1])}, outputs={"y": ("FP32", [-1])}, name="doubling")
class Doubling:
    async def infer(self, inputs):
        return {"y": inputs["x"] * 2}


@serve.deployment
def plain(request):
    return "no model"


@serve.deployment(max_constructor_retry_count=1)
class Broken:
    def __init__(self):
        raise RuntimeError("no weights")

    def ServerLive(self, request): ...


@pytest.fixture
def beside(system, client):
    system.deploy(Doubling.bind(), name="another", route_prefix="/another")
    system.deploy(plain.bind(), name="a-plain-one", route_prefix="/plain")
    with pytest.raises(RuntimeError, match="no weights"):
        system.deploy(Broken.bind(), name="a-broken-one", route_prefix=None)
    wait_until(lambda: is_there(client, "doubling"), 5, "the new applications are known")
    yield
    for name in ("another", "a-plain-one", "a-broken-one"):
        assert applications.delete(system.connection, name)


def is_there(client, model):
    try:
        return client.is_model_ready(model)
    except InferenceServerException:
        return False


@pytest.mark.slow
def test_of_several_applications_the_one_with_the_model_answers(client, beside):
    for _ in range(2):  # the second time it is known which
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata().name == "greenroom"
        assert client.is_model_ready("summing")
        assert client.is_model_ready("doubling")
        assert client.infer("summing", asked([[1, 2]])).as_numpy("sums").tolist() == [3.0]
        x = triton.InferInput("x", [2], "FP32")
        x.set_data_from_numpy(np.array([1, 2], np.float32))
        assert client.infer("doubling", [x]).as_numpy("y").tolist() == [2.0, 4.0]
    for call in (client.is_model_ready, client.get_model_metadata):
        told = "a-broken-one#Broken is unavailable"  # which may be the one with this model
        with pytest.raises(InferenceServerException, match=told) as caught:
            call("none")
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
