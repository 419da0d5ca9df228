"""serve.inference over HTTP and gRPC, through Triton's clients and by hand."""

from __future__ import annotations

import http.client
import json
import struct

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from greenroom import serve
from greenroom.serve.admin import applications
from tests.support.systems import RunningSystem, free_port, wait_until

FUNCTION = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"

ALL = {
    f"x_{name}": (name, [-1])
    for name in (
        *("BOOL", "FP16", "FP32", "FP64", "BYTES"),
        *(f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)),
    )
}


@serve.deployment
@serve.inference(
    inputs={"rows": ("FP32", [-1, 3]), "label": ("BYTES", [1])},
    outputs={"sums": ("FP64", [-1]), "labels": ("BYTES", [-1])},
    name="summing",
    version="2",
)
class Summing:
    def infer(self, inputs):
        assert not inputs["rows"].flags.writeable
        label = inputs["label"][0]
        if label == b"break":
            raise LookupError("secret")
        if label == b"short":
            return {"sums": inputs["rows"].sum()}
        sums = inputs["rows"].sum(axis=1)
        labels = np.array([label + b": %d" % total for total in sums], np.object_)
        return {"sums": sums, "labels": labels}


@serve.deployment
@serve.inference(inputs=ALL, outputs=ALL)
class Same:
    async def infer(self, inputs):
        return inputs


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    system = RunningSystem(
        tmp_path_factory.mktemp("inference") / "state",
        GREENROOM_GRPC_PORT=str(free_port()),
        GREENROOM_GRPC_SERVICER_FUNCTIONS=FUNCTION,
    )
    system.start()
    try:
        system.deploy(Summing.bind(), name="summing", route_prefix="/")
        system.deploy(Same.bind(), name="same", route_prefix="/same")
        yield system
    finally:
        system.stop()


@pytest.fixture
def client(system):
    with triton.InferenceServerClient(system.url.removeprefix("http://")) as client:
        yield client


def tensor(name, array, *, binary=True, datatype=None):
    made = triton.InferInput(name, array.shape, datatype or ALL["x_" + name][0])
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def asked(rows, label="sum", *, binary=True):
    return [
        tensor("rows", np.array(rows, np.float32), binary=binary, datatype="FP32"),
        tensor("label", np.array([label], np.object_), binary=binary, datatype="BYTES"),
    ]


@pytest.mark.parametrize("binary", [True, False])
def test_a_model_answers_in_both_forms(client, binary):
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("labels", "sums")]
    result = client.infer(
        "summing",
        asked([[1, 2, 3], [4, 5, 6]], binary=binary),
        outputs=outputs,
        request_id="mine",
        model_version="2",
    )
    assert result.as_numpy("sums").tolist() == [6.0, 15.0]
    assert result.as_numpy("sums").dtype == np.float64
    labels = [t if isinstance(t, bytes) else t.encode() for t in result.as_numpy("labels")]
    assert labels == [b"sum: 6", b"sum: 15"]
    about = result.get_response()
    assert (about["id"], about["model_name"], about["model_version"]) == ("mine", "summing", "2")


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("summing")
    assert client.is_model_ready("summing", "2")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("summing", "3")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata("summing", "2")
    assert about["versions"] == ["2"]
    assert about["inputs"][0] == {"name": "rows", "datatype": "FP32", "shape": [-1, 3]}


@pytest.mark.parametrize("binary", [True, False])
def test_all_datatypes_survive_the_way_there_and_back(system, binary):
    arrays = {}
    for name, (datatype, _) in ALL.items():
        if datatype == "BYTES":
            arrays[name] = np.array([b"", b"\x00a", "é".encode()], np.object_)
        elif datatype == "BOOL":
            arrays[name] = np.array([True, False, True])
        elif datatype.startswith("FP"):
            arrays[name] = np.array([-1.5, 0, 2], f"f{int(datatype[2:]) // 8}")
        else:
            limits = np.iinfo(datatype.lower())
            arrays[name] = np.array([limits.min, 1, limits.max], limits.dtype)
    inputs = []
    for name, array in arrays.items():
        made = triton.InferInput(name, array.shape, ALL[name][0])
        is_binary = binary or ALL[name][0] == "FP16"  # which the client never sends as JSON
        made.set_data_from_numpy(array, binary_data=is_binary)
        inputs.append(made)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in arrays]
    url = f"{system.url.removeprefix('http://')}/same"
    with triton.InferenceServerClient(url) as client:
        result = client.infer("Same", inputs, outputs=outputs)
    for name, array in arrays.items():
        got = result.as_numpy(name)
        if ALL[name][0] == "BYTES":
            got = np.array([t if isinstance(t, bytes) else t.encode() for t in got], np.object_)
        assert got.tolist() == array.tolist(), name
        assert got.dtype == array.dtype


def test_what_user_code_does_wrong_is_500_without_its_text(client):
    for label in ("break", "short"):
        with pytest.raises(InferenceServerException, match="raised an exception") as caught:
            client.infer("summing", asked([[1, 2, 3]], label))
        assert caught.value.status() == "500"


ROWS = {"name": "rows", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
LABEL = {"name": "label", "shape": [1], "datatype": "BYTES", "data": ["a"]}


def but(**changes):
    return {"inputs": [{**ROWS, **changes}, LABEL]}


WRONG = [
    (but(shape=[3, 1]), "'rows': shape=[3, 1]: must be [-1, 3]"),
    (but(shape=[3]), "shape=[3]: must be [-1, 3]"),
    (but(shape=[-1, 3]), "shape"),
    (but(shape=[2**40, 3]), "has 3 values"),
    (but(datatype="FP64"), "datatype='FP64': must be FP32"),
    (but(datatype="X" * 1000), "must be FP32"),
    (but(data=[1, 2]), "has 2 values"),
    (but(data=[1, 2, "3"]), "values of type str, which are no FP32"),
    (but(data=[[1, 2], [3]]), "the nesting of its data is not its shape [1, 3]"),
    (but(data=[[[1, 2, 3]]]), "nesting of its data"),
    (but(data=None), "neither data"),
    (but(name="other"), "no input is named 'other'; there are: label, rows"),
    (but(parameters={"binary_data_size": 12}, data=None), "0 bytes are left"),
    ({"inputs": [ROWS]}, "input label: missing"),
    ({"inputs": [ROWS, ROWS, LABEL]}, "comes twice"),
    ({"inputs": []}, "inputs"),
    ({}, "inputs: "),
    ({**but(), "outputs": [{"name": "none"}]}, "no output is named 'none'"),
]


def post(system, body, path="/v2/models/summing/infer", **headers):
    connection = http.client.HTTPConnection(system.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    assert len(text) < 2000
    return answer.status, json.loads(text)["error"]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_wrong_tensors_are_refused_by_name(system, body, message):
    status, error = post(system, json.dumps(body))
    assert status == 400
    assert message in error


def test_wrong_json_is_refused(system):
    for body in (b"", b"{", b"[" * 100_000, b'{"inputs": [' + b"1," * 300_000 + b"1]}", b"\xff"):
        assert post(system, body)[0] == 400
    assert post(system, b" " * ((16 << 20) + 1))[0] == 413
    assert post(system, b"{}", "/v2/models/none/infer")[0] == 404
    assert post(system, b"{}", "/v2/models/summing/versions/9/infer")[0] == 404
    assert post(system, b"{}", Content_Encoding="gzip")[0] == 415
    assert post(system, b"{}", "/v2/none")[0] == 404


def binary(system, rows, label, size=12, label_size=None, length=None):
    """Post tensors as binary data."""
    row = {**ROWS, "parameters": {"binary_data_size": size}}
    text = {**LABEL, "parameters": {"binary_data_size": label_size or len(label)}}
    del row["data"], text["data"]
    head = json.dumps({"inputs": [row, text]}).encode()
    length = str(len(head)) if length is None else length
    headers = {"Inference_Header_Content_Length": length}
    return post(system, head + rows + label, **headers)


def test_wrong_binary_data_is_refused(system):
    rows, label = b"\0" * 12, struct.pack("<I", 1) + b"a"
    assert "needs 12 bytes" in binary(system, rows, label, size=8)[1]
    assert "0 bytes are left" in binary(system, rows, b"", label_size=5)[1]
    assert "5 bytes are left" in binary(system, rows, label, label_size=2**60)[1]
    assert "5 bytes are left" in binary(system, rows, label, label_size=-1)[1]
    assert "5 bytes are left" in binary(system, rows, label, label_size="5")[1]
    assert "1 bytes that no input claims" in binary(system, rows, label + b"b", label_size=5)[1]
    assert "ends beyond" in binary(system, rows, struct.pack("<I", 2**32 - 1) + b"a")[1]
    assert "ends beyond" in binary(system, rows, b"\0\0\0")[1]
    assert "not 1 byte strings" in binary(system, rows, label + label)[1]
    for length in ("-1", "1e3", "9" * 30, "٣", "", "0x10", "99999"):
        status, error = binary(system, rows, label, length=length.encode())
        assert status == 400
        assert "Inference-Header-Content-Length" in error


# --- Over gRPC ------------------------------------------------------------------------------------


@pytest.fixture
def target(system):
    return f"127.0.0.1:{system.settings.grpc_port}"


@pytest.fixture
def rpc(target):
    with triton_grpc.InferenceServerClient(target) as client:
        yield client


def rpc_asked(rows, label="sum"):
    arrays = {"rows": np.array(rows, np.float32), "label": np.array([label], np.object_)}
    inputs = []
    for name, datatype in (("rows", "FP32"), ("label", "BYTES")):
        inputs.append(triton_grpc.InferInput(name, arrays[name].shape, datatype))
        inputs[-1].set_data_from_numpy(arrays[name])
    return inputs


def test_a_model_answers_over_grpc(rpc):
    result = rpc.infer("summing", rpc_asked([[1, 2, 3], [4, 5, 6]]), request_id="mine")
    assert result.as_numpy("sums").tolist() == [6.0, 15.0]
    assert result.as_numpy("labels").tolist() == [b"sum: 6", b"sum: 15"]
    assert (result.get_response().id, result.get_response().model_version) == ("mine", "2")
    only = [triton_grpc.InferRequestedOutput("sums")]
    assert rpc.infer("summing", rpc_asked([[1, 2, 3]]), outputs=only).as_numpy("labels") is None


def test_health_and_metadata_over_grpc(rpc):
    assert rpc.is_server_live()
    assert rpc.is_server_ready()
    assert rpc.is_model_ready("summing", "2")
    assert rpc.get_server_metadata().name == "greenroom"
    about = rpc.get_model_metadata("summing")
    assert [(each.name, each.datatype, list(each.shape)) for each in about.inputs] == [
        ("rows", "FP32", [-1, 3]),
        ("label", "BYTES", [1]),
    ]


def test_typed_contents_are_taken_too(target):
    request = service_pb2.ModelInferRequest(model_name="summing")
    rows = request.inputs.add(name="rows", datatype="FP32", shape=[1, 3])
    rows.contents.fp32_contents.extend([1.5, 2, 0])
    label = request.inputs.add(name="label", datatype="BYTES", shape=[1])
    label.contents.bytes_contents.append(b"\xff")
    with grpc.insecure_channel(target) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        request.inputs[0].shape[:] = [2, 3]
        with pytest.raises(grpc.RpcError, match="has 3 values") as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert np.frombuffer(answer.raw_output_contents[0], np.float64).tolist() == [3.5]
    assert answer.raw_output_contents[1] == b"\x04\0\0\0\xff: 3"
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_wrong_requests_have_a_status_over_grpc(rpc):
    def refused(code, text, *call):
        with pytest.raises(InferenceServerException, match=text) as caught:
            rpc.infer(*call, headers={"application": "summing"})
        assert caught.value.status() == f"StatusCode.{code}"

    good = rpc_asked([[1, 2, 3]])
    refused("NOT_FOUND", "no model 'none'", "none", good)
    refused("NOT_FOUND", "no version '7'", "summing", good, "7")
    refused("INVALID_ARGUMENT", "must be .-1, 3.", "summing", rpc_asked([[1, 2]]))
    refused("INVALID_ARGUMENT", "label: missing", "summing", good[:1])
    refused("INTERNAL", "raised an exception", "summing", rpc_asked([[1, 2, 3]], "break"))
    good[0].set_shape([2, 3])
    refused("INVALID_ARGUMENT", "needs 24 bytes", "summing", good)


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
def beside(system, rpc):
    system.deploy(Doubling.bind(), name="another", route_prefix="/another")
    system.deploy(plain.bind(), name="a-plain-one", route_prefix="/plain")
    with pytest.raises(RuntimeError, match="no weights"):
        system.deploy(Broken.bind(), name="a-broken-one", route_prefix=None)
    wait_until(lambda: is_there(rpc, "doubling"), 5, "the new applications are known")
    yield
    for name in ("another", "a-plain-one", "a-broken-one"):
        assert applications.delete(system.connection, name)


def is_there(rpc, model):
    try:
        return rpc.is_model_ready(model)
    except InferenceServerException:
        return False


@pytest.mark.slow
def test_of_several_applications_the_one_with_the_model_answers(rpc, beside):
    for _ in range(2):  # the second time it is known which
        assert rpc.is_server_live()
        assert rpc.is_server_ready()
        assert rpc.get_server_metadata().name == "greenroom"
        assert rpc.is_model_ready("summing")
        assert rpc.is_model_ready("doubling")
        assert rpc.infer("summing", rpc_asked([[1, 2, 3]])).as_numpy("sums").tolist() == [6.0]
        x = triton_grpc.InferInput("x", [2], "FP32")
        x.set_data_from_numpy(np.array([1, 2], np.float32))
        assert rpc.infer("doubling", [x]).as_numpy("y").tolist() == [2.0, 4.0]
    for call in (rpc.is_model_ready, rpc.get_model_metadata):
        message = "a-broken-one#Broken is unavailable"  # which may be the one with this model
        with pytest.raises(InferenceServerException, match=message) as caught:
            call("none")
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
