"""A process that deploys one document for an HTTP worker, or plans to, and ends.

It reads what :class:`Asked` describes from stdin, and answers on stdout with ``{"answer": ...}`` or
``{"kind": ..., "error": ...}``. User code is imported here, as ``greenroom deploy`` does: what it
prints goes to the worker's log, and what it starts is killed with this process's group.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TypedDict

from greenroom.actors.runtime.connection import Connection
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import ERRORS_BY_KIND, GreenroomError, InvalidRequestError
from greenroom.core.operations import Canary
from greenroom.serve.admin import applications, declarative
from greenroom.serve.cli.config_file import ConfigFile
from greenroom.serve.cli.deploying import read_canary
from greenroom.serve.schema import read_document


class Asked(TypedDict):
    """What a worker asks for; all but the first three are the query's."""

    text: str
    kind: str  # json or yaml
    user: str
    plan: bool
    keep_others: bool
    prune: bool
    if_version: int | None
    canary: str | None  # shares, as for the flag
    compare: str | None
    tolerance: float | None
    ignore: str | None  # JSON pointers with commas between
    abort_if: str | None  # rules with commas between
    hold_s: float | None
    min_samples: int | None


def applied(asked: Asked) -> dict[str, Any]:
    """Deploy a document in the name of its user, or plan to; return what to answer."""
    others = {"keep_others": asked["keep_others"], "from_file": True, "prune": asked["prune"]}
    try:
        # The environment here is the server's: none of its variables are for who may deploy.
        file = ConfigFile(Path(f"body.{asked['kind']}"), {}, asked["text"])
        canary = _canary(asked)
        # Modules are installed, or in a working_dir.
        with tempfile.TemporaryDirectory() as nothing, file.located():
            document, folder = read_document(file.document), Path(nothing)
            built = declarative.build_document(document, folder, folder)
        with contextlib.closing(Connection.open(read_settings(), user=asked["user"])) as connection:
            if asked["plan"]:
                return {"answer": applications.plan(connection, built, **others)}
            answer = applications.apply(
                connection,
                built,
                if_version=asked["if_version"],
                canary=canary,
                **others,
            )
            return {"answer": answer}
    except GreenroomError as error:
        known = (each.__name__ for each in type(error).__mro__ if each.__name__ in ERRORS_BY_KIND)
        return {"kind": next(known), "error": str(error)}


def _canary(asked: Asked) -> Canary | None:
    rules: dict[str, Any] = {
        "compare": asked["compare"],
        "tolerance": asked["tolerance"],
        "ignore": _words(asked["ignore"]),
        "abort_if": _words(asked["abort_if"]),
        "hold_s": asked["hold_s"],
        "min_samples": asked["min_samples"],
    }
    if asked["canary"]:
        return read_canary(asked["canary"], **rules)
    if given := [name for name, value in rules.items() if value]:
        raise InvalidRequestError(f"query: {', '.join(given)}: must come with canary")
    return None


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def main() -> None:
    """Answer what is asked on stdin."""
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:  # what anything prints goes to stderr
        os.dup2(2, 1)
        json.dump(applied(asked), answer)
    sys.stderr.flush()
    os._exit(0)  # threads of user code may never end


if __name__ == "__main__":
    main()
