"""``serve.inference``: a class of numpy arrays speaks the Open Inference Protocol, version 2.

Theory of operation. A request is JSON, perhaps followed by the binary data of its tensors, one
after the other (the binary tensor extension: a header says where the JSON ends). What is here of it
is checked against the declared inputs before an array is made, so that user code gets exactly what
it has declared. Outputs are checked likewise; a mismatch there is the deployment's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from importlib.metadata import version as version_of
from itertools import chain
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from greenroom.core.errors import BodyTooLargeError, GrpcStatusError, InvalidRequestError
from greenroom.core.validation import describe, unknown_name
from greenroom.serve.protocols.apps import (
    Answerer,
    describe_failure,
    give_app,
    instance,
    make_app,
    read_body,
)

MAX_JSON_BYTES = 16 << 20  # it takes many times its size in memory; large tensors come as binary
HEADER = "inference-header-content-length"
BYTES = "BYTES"
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    BYTES: np.object_,
} | {
    f"{kind.upper()}{bits}": np.dtype(f"{kind}{bits}")
    for kind in ("int", "uint")
    for bits in (8, 16, 32, 64)
}
_IN_JSON: dict[str, set[type]] = {
    "b": {bool},
    "i": {int},
    "u": {int},
    "f": {int, float},
    "O": {str},
}  # by dtype's kind
C = TypeVar("C", bound=type)
Array = Any  # of numpy, which is not installed where types are checked


class Spec(NamedTuple):
    """What a tensor must be; -1 in its shape stands for any size."""

    datatype: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """Numpy's type; on the wire, numbers are little-endian."""
        return np.dtype(DTYPES[self.datatype]).newbyteorder("<")

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape is allowed."""
        pairs = zip(self.shape, shape, strict=False)
        return len(shape) == len(self.shape) and all(want in {-1, size} for want, size in pairs)


class _Tensor(BaseModel):
    name: str = Field(min_length=1, max_length=1000)
    shape: Annotated[
        list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=32, fail_fast=True)
    ]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Output(BaseModel):
    name: str = Field(min_length=1, max_length=1000)
    parameters: dict[str, Any] = {}


class _Inference(BaseModel):
    id: str = Field(default="", max_length=1000)
    parameters: dict[str, Any] = {}
    inputs: Annotated[list[_Tensor], Field(min_length=1, max_length=1000, fail_fast=True)]
    outputs: Annotated[list[_Output], Field(max_length=1000, fail_fast=True)] = []


def inference(
    *,
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    outputs: Mapping[str, tuple[str, Sequence[int]]],
    name: str | None = None,
    version: str = "1",
) -> Callable[[C], C]:
    """Serve a class as a model of the Open Inference Protocol: below ``@serve.deployment``.

    ``inputs`` and ``outputs`` are the tensors: by name, datatype and shape, in which -1 is any
    size. The class's ``infer``, sync or async, gets a dict of arrays by input, which cannot be
    written to, and returns one by output. The routes are those below /v2; the model's name is the
    class's unless ``name`` is given. TypeError or ValueError for what cannot be decorated.
    """
    declared = {
        kind: {tensor: _spec(tensor, *given) for tensor, given in tensors.items()}
        for kind, tensors in (("inputs", inputs), ("outputs", outputs))
    }
    for kind, specs in declared.items():
        if not specs:
            raise ValueError(f"{kind}={{}}: a model has at least one of them")

    def decorate(cls: C) -> C:
        model = _Model(name or cls.__name__, version, declared["inputs"], declared["outputs"])
        give_app(cls, "serve.inference", ("infer",), partial(_make_app, model))
        for rpc in DESCRIPTIONS:
            setattr(cls, rpc, partialmethod(_describe, model, rpc))
        setattr(cls, "ModelInfer", partialmethod(_model_infer, model))  # noqa: B010  # new
        return cls

    return decorate


def _spec(name: str, datatype: str, shape: Sequence[int]) -> Spec:
    if datatype not in DTYPES:
        raise ValueError(f"{name}: datatype={datatype!r}: must be one of {', '.join(DTYPES)}")
    if not all(isinstance(size, int) and size >= -1 for size in shape):
        raise ValueError(f"{name}: shape={shape!r}: must be whole numbers, or -1 for any size")
    return Spec(datatype, tuple(shape))


# --- The app --------------------------------------------------------------------------------------


def _make_app(model: _Model) -> Starlette:
    answers: dict[str, Answerer] = {
        "GET /v2": partial(_answer_description, model, "ServerMetadata"),
        "GET /v2/health/live": partial(_answer_description, model, "ServerLive"),
        "GET /v2/health/ready": partial(_answer_description, model, "ServerReady"),
    }
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        answers |= {
            f"GET {path}": partial(_answer_description, model, "ModelMetadata"),
            f"GET {path}/ready": partial(_answer_description, model, "ModelReady"),
            f"POST {path}/infer": model.infer,
        }
    return make_app(answers, _error_response)


async def _answer_description(model: _Model, what: str, request: Request) -> Response:
    return JSONResponse(model.describe(what, **request.path_params))


def _error_response(error: Exception) -> Response:
    status, text, headers = describe_failure(error, _WrongRequestError)
    return JSONResponse({"error": text}, status, headers)


class _WrongRequestError(InvalidRequestError):
    """The client's mistake; user code may raise InvalidRequestError for other reasons."""


class _WrongNameError(_WrongRequestError):
    http_status = 404


class _Model:
    """What the routes do."""

    def __init__(
        self, name: str, version: str, inputs: dict[str, Spec], outputs: dict[str, Spec]
    ) -> None:
        self._name = name
        self._version = version
        self._inputs = inputs
        self._outputs = outputs

    def describe(self, what: str, name: str | None = None, version: str = "") -> dict[str, Any]:
        """Return what the RPC ``what`` answers, about the model where that is named."""
        if name is not None:
            self.check_name(name, version)
        if what == "ServerMetadata":
            about = {"name": "greenroom", "version": version_of("greenroom")}
            return {**about, "extensions": ["binary_tensor_data"]}
        if what == "ModelMetadata":
            tensors = {
                kind: [
                    {"name": name, "datatype": spec.datatype, "shape": list(spec.shape)}
                    for name, spec in specs.items()
                ]
                for kind, specs in (("inputs", self._inputs), ("outputs", self._outputs))
            }
            about = {"name": self._name, "platform": "greenroom"}
            return {**about, "versions": [self._version], **tensors}
        return {"name": name, "live": True, "ready": True}  # as it answers

    async def infer(self, request: Request) -> Response:
        """Run the model."""
        self.check_name(request.path_params["name"], request.path_params.get("version", ""))
        asked, binary = await _read(request)
        outputs, parts = await self.run(instance(), asked, binary)
        answer = {**self.answer_head(asked), "outputs": outputs}
        head = json.dumps(answer, allow_nan=False).encode()
        if not parts:
            return Response(head, media_type="application/json")
        headers = {HEADER: str(len(head))}
        whole = b"".join((head, *parts))
        return Response(whole, headers=headers, media_type="application/octet-stream")

    def answer_head(self, asked: _Inference) -> dict[str, str]:
        """Return what an answer has beside its outputs."""
        head = {"model_name": self._name, "model_version": self._version}
        return head | {"id": asked.id} if asked.id else head

    async def run(
        self, servable: Any, asked: _Inference, binary: memoryview
    ) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Run the model; return the outputs as JSON has them, and the data of binary ones."""
        arrays = self._arrays(asked, binary)
        wanted = self._wanted(asked)
        if inspect.iscoroutinefunction(servable.infer):
            made = await servable.infer(arrays)
        else:
            made = await asyncio.to_thread(servable.infer, arrays)
        return self._encoded(wanted, self._checked(made))

    def check_name(self, name: str, version: str) -> None:
        """Raise where this is another model, or another version; "" is any."""
        if name != self._name:
            raise _WrongNameError(f"no model {name[:100]!r}: this is {self._name!r}")
        if version not in {"", self._version}:
            raise _WrongNameError(
                f"{name!r} has no version {version[:100]!r}: this is {self._version!r}"
            )

    def _arrays(self, asked: _Inference, binary: memoryview) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for tensor in asked.inputs:
            spec = self._spec_of(tensor)
            if tensor.name in arrays:
                raise _wrong(tensor, "comes twice")
            size = tensor.parameters.get("binary_data_size")
            if size is None:
                arrays[tensor.name] = _from_json(tensor, spec)
                continue
            if not isinstance(size, int) or not 0 <= size <= len(binary):
                text = (
                    f"binary_data_size={str(size)[:50]}: {len(binary)} bytes are left of the body"
                )
                raise _wrong(tensor, text)
            arrays[tensor.name] = _from_binary(tensor, spec, binary[:size])
            binary = binary[size:]
        if missing := self._inputs.keys() - arrays.keys():
            raise _WrongRequestError(f"input {', '.join(sorted(missing))}: missing")
        if len(binary):
            raise _WrongRequestError(f"the body has {len(binary)} bytes that no input claims")
        return arrays

    def _spec_of(self, tensor: _Tensor) -> Spec:
        """Return what a tensor must be, and what it says that it is."""
        spec = self._inputs.get(tensor.name)
        if spec is None:
            text = unknown_name("input", tensor.name[:100], self._inputs)
            raise _WrongRequestError(str(text))
        if tensor.datatype != spec.datatype:
            raise _wrong(tensor, f"datatype={tensor.datatype[:20]!r}: must be {spec.datatype}")
        if not spec.fits(tensor.shape):
            raise _wrong(tensor, f"shape={tensor.shape}: must be {list(spec.shape)}")
        if tensor.data is not None and "binary_data_size" in tensor.parameters:
            raise _wrong(tensor, "has data and binary_data_size")
        return spec

    def _wanted(self, asked: _Inference) -> dict[str, bool]:
        """Return the outputs to send, and whether as binary data."""
        default = asked.parameters.get("binary_data_output", False) is True
        if not asked.outputs:
            return dict.fromkeys(self._outputs, default)
        for output in asked.outputs:
            if output.name not in self._outputs:
                text = unknown_name("output", output.name[:100], self._outputs)
                raise _WrongRequestError(str(text))
        return {
            output.name: output.parameters.get("binary_data", default) is True
            for output in asked.outputs
        }

    def _checked(self, made: Any) -> dict[str, Array]:
        """Return the outputs as they are declared; TypeError or ValueError where they are not."""
        if not isinstance(made, Mapping) or made.keys() != self._outputs.keys():
            names = list(made) if isinstance(made, Mapping) else type(made).__name__
            raise TypeError(f"infer returned {names}: must be a dict of {list(self._outputs)}")
        arrays = {}
        for name, spec in self._outputs.items():
            array = np.asarray(made[name])
            if spec.datatype == BYTES:
                if array.dtype.kind not in "OSU":
                    raise TypeError(f"infer returned {name} of {array.dtype}: must be strings")
            else:
                array = array.astype(spec.dtype, casting="same_kind", copy=False)
            if not spec.fits(array.shape):
                raise ValueError(
                    f"infer returned {name} of shape {array.shape}: must be {spec.shape}"
                )
            arrays[name] = array
        return arrays

    def _encoded(
        self, wanted: dict[str, bool], arrays: dict[str, Array]
    ) -> tuple[list[dict[str, Any]], list[bytes]]:
        outputs: list[dict[str, Any]] = []
        parts: list[bytes] = []
        for name, is_binary in wanted.items():
            array, datatype = arrays[name], self._outputs[name].datatype
            output: dict[str, Any] = {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype,
            }
            strings = [_as_bytes(value) for value in array.flat] if datatype == BYTES else []
            if is_binary:
                part = array.tobytes()
                if datatype == BYTES:
                    part = _prefixed(strings)
                output["parameters"] = {"binary_data_size": len(part)}
                parts.append(part)
            elif datatype == BYTES:
                output["data"] = [each.decode() for each in strings]
            else:
                output["data"] = array.ravel().tolist()
            outputs.append(output)
        return outputs, parts


# --- The service of gRPC: GRPCInferenceService ----------------------------------------------------
#
# The class gets its methods. Their messages are of the stubs that the gRPC server was started with,
# such as Triton's or KServe's, so answers are made of what a request's own file describes.


DESCRIPTIONS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata")


def _message(request: Any, rpc: str, fields: Mapping[str, Any]) -> Any:
    from google.protobuf import message_factory  # noqa: PLC0415  # of the extra

    described = request.DESCRIPTOR.file.message_types_by_name[f"{rpc}Response"]
    known = {name: value for name, value in fields.items() if name in described.fields_by_name}
    return message_factory.GetMessageClass(described)(**known)


def _describe(_servable: Any, model: _Model, rpc: str, request: Any) -> Any:
    about = {} if rpc.startswith("Server") else {"name": request.name, "version": request.version}
    with _statuses():
        return _message(request, rpc, model.describe(rpc, **about))


async def _model_infer(servable: Any, model: _Model, request: Any) -> Any:
    with _statuses():
        model.check_name(request.model_name, request.model_version)
        asked, binary = _asked(request)
        outputs, parts = await model.run(servable, asked, binary)
    names = ("name", "datatype", "shape")
    fields = {
        **model.answer_head(asked),
        "outputs": [{name: output[name] for name in names} for output in outputs],
        "raw_output_contents": parts,
    }
    return _message(request, "ModelInfer", fields)


def _asked(request: Any) -> tuple[_Inference, memoryview]:
    """Return a request as REST has it; typed contents of byte strings become binary data."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise _WrongRequestError(f"raw_input_contents: {len(raw)} for {len(request.inputs)} inputs")
    inputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for number, tensor in enumerate(request.inputs):
        given = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        typed = [list(values) for _, values in tensor.contents.ListFields()]
        if raw and typed:
            raise _WrongRequestError(f"input {tensor.name[:100]!r}: has contents, and raw ones")
        if raw or tensor.datatype == BYTES:
            part = raw[number] if raw else _prefixed(tensor.contents.bytes_contents)
            given["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            given["data"] = typed[0] if typed else []
        inputs.append(given)
    outputs = [{"name": output.name} for output in request.outputs]
    values = {
        "id": request.id,
        "inputs": inputs,
        "outputs": outputs,
        "parameters": {"binary_data_output": True},
    }
    try:
        return _Inference.model_validate(values), memoryview(b"".join(parts))
    except ValidationError as error:
        raise _WrongRequestError(describe("inference request", error)) from None


@contextlib.contextmanager
def _statuses() -> Iterator[None]:
    """Give a client's mistakes the statuses of gRPC."""
    try:
        yield
    except _WrongRequestError as error:
        code = "NOT_FOUND" if isinstance(error, _WrongNameError) else "INVALID_ARGUMENT"
        raise GrpcStatusError(code, str(error)) from None


# --- Tensors on the wire --------------------------------------------------------------------------


async def _read(request: Request) -> tuple[_Inference, memoryview]:
    """Return the request, and the binary data after its JSON."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(415, f"Content-Encoding={encoding[:50]!r}: send it uncompressed")
    length = request.headers.get(HEADER)
    if length is None:
        return _parsed(await read_body(request, MAX_JSON_BYTES)), memoryview(b"")
    body = await read_body(request)
    number = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else -1
    if not 0 <= number <= len(body):
        raise _WrongRequestError(
            f"Inference-Header-Content-Length={length[:50]!r}: must be a number of bytes, "
            f"at most the body's {len(body)}"
        )
    if number > MAX_JSON_BYTES:
        raise BodyTooLargeError(f"the JSON is over {MAX_JSON_BYTES} bytes")
    return _parsed(body[:number]), memoryview(body)[number:]


def _parsed(text: bytes) -> _Inference:
    try:
        return _Inference.model_validate_json(text)
    except ValidationError as error:
        raise _WrongRequestError(describe("inference request", error)) from None


def _wrong(tensor: _Tensor, text: str) -> InvalidRequestError:
    return _WrongRequestError(f"input {tensor.name[:100]!r}: {text}")


def _from_json(tensor: _Tensor, spec: Spec) -> Array:
    values = tensor.data
    if not isinstance(values, list):
        raise _wrong(tensor, "has neither data, which is a list, nor binary_data_size")
    if values and isinstance(values[0], list):  # nested as the shape says; else it is flat
        for size in tensor.shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in values):
                raise _wrong(tensor, f"the nesting of its data is not its shape {tensor.shape}")
            values = list(chain.from_iterable(values))
    if len(values) != math.prod(tensor.shape):
        raise _wrong(tensor, f"has {len(values)} values, its shape {tensor.shape} others")
    dtype = spec.dtype
    if wrong := set(map(type, values)) - _IN_JSON[dtype.kind]:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise _wrong(tensor, f"has values of type {names}, which are no {spec.datatype}")
    if dtype.kind in "iu" and values:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if min(values) < least or max(values) > most:
            raise _wrong(tensor, f"has values outside of {spec.datatype}: {least} to {most}")
    if spec.datatype == BYTES:
        values = [text.encode("utf-8", "surrogatepass") for text in values]
    return _shaped(tensor, np.array(values, dtype))


def _from_binary(tensor: _Tensor, spec: Spec, content: memoryview) -> Array:
    number = math.prod(tensor.shape)
    if spec.datatype == BYTES:
        return _shaped(tensor, _byte_strings(tensor, content, number))
    if len(content) != number * spec.dtype.itemsize:
        size = number * spec.dtype.itemsize
        raise _wrong(tensor, f"binary_data_size={len(content)}: its shape needs {size} bytes")
    if spec.datatype == "BOOL" and number and np.frombuffer(content, np.uint8).max() > 1:
        raise _wrong(tensor, "has bytes other than 0 and 1")
    return _shaped(tensor, np.frombuffer(content, spec.dtype))


def _byte_strings(tensor: _Tensor, content: memoryview, number: int) -> Array:
    """Read byte strings, each of which comes after its length."""
    found: list[bytes] = []
    at = 0
    while at < len(content) and len(found) < number:
        end = at + 4
        if end <= len(content):
            end += struct.unpack_from("<I", content, at)[0]
        if end > len(content):
            raise _wrong(tensor, f"the byte string at {at} ends beyond its binary data")
        found.append(bytes(content[at + 4 : end]))
        at = end
    if len(found) != number or at != len(content):
        raise _wrong(tensor, f"its binary data is not {number} byte strings, each after its length")
    array: Array = np.empty(number, np.object_)
    array[:] = found
    return array


def _prefixed(strings: Iterable[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in strings)


def _shaped(tensor: _Tensor, array: Array) -> Array:
    try:
        array = array.reshape(tensor.shape)
    except ValueError as error:  # too large for numpy, though empty
        raise _wrong(tensor, str(error)) from None
    array.flags.writeable = False  # as those of binary data, which are views of the body
    return array


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
