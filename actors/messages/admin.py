"""What clients send to the controller, and its answer; see :mod:`greenroom.core.operations`."""

from __future__ import annotations

from typing import Any

from greenroom.actors.messages.queries import Message, message
from greenroom.core.operations import Operation


@message
class Request(Message):
    """Client to controller: carry out this operation; answered by RequestReply.

    A client repeats it with the same id until it is answered. ``user`` is who asks, as the
    client's system names them; nothing proves it.
    """

    request_id: str
    operation: str  # its key in the table of operations
    fields: dict[str, Any]
    user: str = ""


@message
class RequestReply(Message):
    """The controller's answer; ``error_kind`` is a class in core.errors, "" for success.

    ``exception`` is the user code's own, cloudpickled, for a deployment that failed.
    """

    request_id: str
    value: Any = None
    error_kind: str = ""
    error: str = ""
    exception: bytes | None = None


def request_of(operation: Operation, request_id: str, user: str = "") -> Request:
    """Return the request for an operation.

    Without the fields that say nothing: an earlier release's controller may not know them.
    """
    known = type(operation).model_fields
    fields = {
        name: value
        for name, value in operation.fields.items()
        if getattr(operation, name) != known[name].default
    }
    return Request(request_id=request_id, operation=operation.key, fields=fields, user=user)
