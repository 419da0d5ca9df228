"""Ray Serve's REST resource, ``/api/serve/applications/``: all applications as one document.

GET answers in the shape of Ray's ``ServeInstanceDetails``, with what there is of it here. PUT takes
a ``ServeDeploySchema``, as JSON or YAML: what is in it is deployed, other applications are deleted,
in one change. The query has the flags of ``greenroom deploy``, DeployFlags. A process of its
own (:mod:`.applying`) does that, since it imports what the document names. It is forked from the
worker, with all that this has imported, which takes longer than the rest; a program is started
where the worker has threads, or modules of users' middlewares, which may have an application's
names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import falcon
from pydantic import ValidationError

from greenroom.actors.runtime import forking
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import GreenroomError, InvalidRequestError, error_from
from greenroom.core.operations import DeployApplications, DeployFlags, GetStatus
from greenroom.core.validation import problems_in
from greenroom.http_front.admin.access import Controller
from greenroom.http_front.request import asked
from greenroom.http_front.responses import json_reply

PUT_TIMEOUT_S = 120.0
DOCUMENT_BYTES = 1024 * 1024
_KINDS = {
    b"": "json",
    b"application/json": "json",
    b"application/x-www-form-urlencoded": "json",  # what curl says of all it sends
    b"application/yaml": "yaml",
    b"application/x-yaml": "yaml",
    b"text/yaml": "yaml",
}
# By name: it imports what runs users' code and starts systems, which no worker has.
_APPLYING = "greenroom.http_front.admin.applying:main"
_PROXY_STATES = {"LOST": "UNHEALTHY", "RUNNING": "HEALTHY"}


class ApplicationsResource:
    """``/api/serve/applications/``."""

    def __init__(self, settings: HostSettings, controller: Controller) -> None:
        self._settings = settings
        self._controller = controller
        self._applying = asyncio.Lock()  # one at a time: each is a process

    async def on_get(self, req: Any, _resp: object) -> None:
        """Answer with all applications and where they run."""
        request = asked(req)
        holder = await self._controller.holder(request.head.named, "viewer")
        status = await self._controller.request(GetStatus(), holder.name)
        request.reply = json_reply(request, instance_details(status, self._settings))

    async def on_put(self, req: Any, _resp: object) -> None:
        """Make the applications be those of the document, or answer what that would change."""
        request = asked(req)
        holder = await self._controller.holder(request.head.named, "deployer")
        try:
            flags = DeployFlags.model_validate_strings(request.fields())
        except ValidationError as error:
            raise InvalidRequestError(f"query: {'; '.join(problems_in(error))}") from None
        text, kind = _document(
            await request.whole_body(DOCUMENT_BYTES), request.head.named.get(b"content-type", b"")
        )
        given = {"text": text, "kind": kind, "user": f"token {holder.name}"}
        async with self._applying:
            answer = await applied(
                {**given, "flags": flags.model_dump(exclude_unset=True)},
                may_fork=not self._settings.http.middlewares,
            )
        request.reply = json_reply(request, answer, is_accepted=bool(answer.get("goals")))

    async def on_delete(self, req: Any, _resp: object) -> None:
        """Delete all applications."""
        request = asked(req)
        holder = await self._controller.holder(request.head.named, "deployer")
        answer = await self._controller.request(DeployApplications(applications=()), holder.name)
        request.reply = json_reply(request, answer, is_accepted=bool(answer["goals"]))


def _document(body: bytes, content_type: bytes) -> tuple[str, str]:
    """Return a document's text and what it is written in; what no process need be started for."""
    named = content_type.partition(b";")[0].strip().lower()
    kind = _KINDS.get(named)
    if kind is None:
        given = f"Content-Type {named[:100].decode('latin-1')!r}"
        raise falcon.HTTPUnsupportedMediaType(
            description=f"{given}: expected application/json or application/yaml"
        )
    try:
        text = body.decode("utf-8-sig")
        if kind == "json":
            json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no {kind.upper()} document: {error}") from None
    return text, kind


async def applied(
    asked_for: Mapping[str, Any], timeout_s: float = PUT_TIMEOUT_S, *, may_fork: bool = True
) -> Any:
    """Deploy a document, or plan to, in a process of its own; return the answer."""
    with os.fdopen(os.memfd_create("greenroom-applying"), "w+") as file:
        json.dump(asked_for, file)
        file.flush()
        status = await _ended(_start(file.fileno(), by_fork=may_fork), timeout_s)
        if status is None:
            raise GreenroomError(
                f"importing and deploying the applications took longer than {timeout_s:g} s"
            )
        if status:
            raise GreenroomError(f"deploying ended with exit code {status}: see front.log")
        file.seek(0)
        answer = json.load(file)
    if "kind" in answer:
        raise error_from(answer["kind"], answer["error"])
    return answer["answer"]


def _start(fd: int, *, by_fork: bool) -> int:
    output = sys.stderr.fileno()
    if by_fork and forking.can_fork():
        main = partial(forking.run, _APPLYING, str(fd))
        return forking.fork(main, output, keep=[fd], is_brief=True)
    child = forking.spawn(_APPLYING, str(fd), output=output, keep=[fd])
    child.returncode = 0  # _ended() waits for it
    return child.pid


async def _ended(pid: int, timeout_s: float) -> int | None:
    """Wait for the end of a child, and kill what it has started; None where it takes too long."""
    loop, ended, watched = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    loop.add_reader(watched, ended.set)
    is_late = False
    try:
        await asyncio.wait_for(ended.wait(), timeout_s)
    except TimeoutError:
        is_late = True
    finally:
        os.kill(pid, signal.SIGKILL)  # also before it leads its group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and what user code has started
        await ended.wait()
        loop.remove_reader(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
    return None if is_late else os.waitstatus_to_exitcode(status)


def instance_details(status: Mapping[str, Any], settings: HostSettings) -> dict[str, Any]:
    """Return a report of the status in the shape of Ray's ServeInstanceDetails."""
    http = settings.http
    addresses = {host["name"]: host["address"].rpartition(":")[0] for host in status["hosts"]}
    leader = status["controller"]["host"]
    return {
        "controller_info": {"node_id": leader, "node_ip": addresses.get(leader)},
        "proxy_location": "EveryNode",
        "http_options": {
            "host": http.host,
            "port": http.port,
            "root_path": http.root_path,
            "request_timeout_s": http.request_timeout_s,
            "keep_alive_timeout_s": http.keep_alive_timeout_s,
        },
        "proxies": {
            host["name"]: {
                "node_id": host["name"],
                "node_ip": addresses[host["name"]],
                "status": _PROXY_STATES.get(host["state"], host["state"]),
            }
            for host in status["hosts"]
        },
        "applications": {
            name: _application(name, of, addresses) for name, of in status["applications"].items()
        },
        "target_capacity": None,
    }


def _application(
    name: str, of: Mapping[str, Any], addresses: Mapping[str, str | None]
) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": of["route_prefix"],
        "docs_path": None,
        "status": of["status"],
        "message": of["message"],
        "deployed_app_config": None,
        "deployments": {
            each: {
                "name": each,
                "status": deployment["status"],
                "message": deployment["message"],
                "target_num_replicas": deployment["target_replicas"],
                "replicas": [
                    {
                        "replica_id": replica["tag"],
                        "state": replica["state"],
                        "pid": replica["pid"],
                        "node_id": replica["host"],
                        "node_ip": addresses.get(replica["host"]),
                    }
                    for replica in deployment["replicas"]
                ],
            }
            for each, deployment in of["deployments"].items()
        },
    }
