"""The admin API of a front in this process, and the cluster that it asks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from greenroom.actors.messages.admin import Request, request_of
from greenroom.actors.runtime.port import new_id
from greenroom.actors.runtime.settings import read_settings
from greenroom.core import operations as ops
from greenroom.core.cluster.admin import Now, carry_out
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.lifecycle.history import Author
from greenroom.core.tokens import digest_of
from tests.http.conftest import AppClient
from tests.http.fake_link import FakeLink
from tests.support.asking import Got

NOW = 1_000.0


class ClusterLink(FakeLink):
    """Asks a cluster in this process; ``failure`` is raised instead."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster({}, 1, NOW)
        self.requests: list[Request] = []
        self.reached: dict[str, bool | Exception] = {}
        self.failure: Exception | None = None
        self.status: dict[str, Any] = {}  # in place of the cluster's

    async def request(
        self, operation: ops.Operation, timeout_s: float, user: str = "", request_id: str = ""
    ) -> Any:
        request = request_of(operation, request_id or new_id(), user)
        operation = ops.read_operation(request.operation, request.fields)
        if not isinstance(operation, ops.ListTokens):
            self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        if self.status and isinstance(operation, ops.GetStatus):
            return self.status
        if isinstance(operation, ops.WaitForGoal):
            reached = self.reached.get(operation.goal_id, False)
            if isinstance(reached, Exception):
                raise reached
            if not reached:
                raise TimeoutError
            return True
        author = Author(request.user, "127.0.0.1", request.request_id)
        return carry_out(self.cluster, operation, author, Now(NOW, time.time()))


class Api:
    """A front in this process, with a token of each role."""

    def __init__(self, folder: Path) -> None:
        self.front = AppClient(read_settings({}, state_dir=folder))
        self.link = ClusterLink()
        self.rebuild()
        for role in ("viewer", "deployer", "admin"):
            self.create_token(role)

    def rebuild(self, **http: Any) -> None:
        self.front.link = self.link
        self.front.rebuild(**http)

    def create_token(self, role: str, token: str = "", expires_at: float | None = None) -> None:
        token = token or role
        digest = digest_of(token)
        asked = ops.CreateToken(name=token, digest=digest, holder_role=role, expires_at=expires_at)
        carry_out(self.link.cluster, asked, Author(), Now(NOW, NOW))

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str = "admin", **headers: str
    ) -> Got:
        head = {"host": "localhost", **{k.replace("_", "-"): v for k, v in headers.items()}}
        if token:
            head.setdefault("authorization", f"Bearer {token}")
        content = b"" if body is None else json.dumps(body).encode()
        pairs = tuple((name.encode(), value.encode()) for name, value in head.items())
        return self.front.ask(method, "/-/api" + path, headers=pairs, body=content)

    def problem(self, *args: Any, **options: Any) -> tuple[int, str]:
        answer = self.ask(*args, **options)
        assert answer["content-type"] == "application/problem+json"
        found = answer.json
        assert found["status"] == answer.status
        assert found["type"] == f"urn:greenroom:problem:{found['title']}"
        return answer.status, found["detail"]
