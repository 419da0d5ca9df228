"""A process that deploys one document for an HTTP worker, and ends.

It reads ``{"document": ..., "user": ...}`` from stdin, and answers on stdout with ``{"answer":
...}`` or ``{"kind": ..., "error": ...}``. User code is imported by a process that this one starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.connection import Connection
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import ERRORS_BY_KIND, GreenroomError
from greenroom.serve.admin import declarative


def applied(document: Any, user: str) -> dict[str, Any]:
    """Deploy a document in the name of ``user``; return what to answer."""
    try:
        with tempfile.TemporaryDirectory() as nothing:  # modules are installed, or in a working_dir
            built = declarative.built_elsewhere(document, Path(nothing))
        with contextlib.closing(Connection.open(read_settings(), user=user)) as connection:
            return {"answer": declarative.apply(connection, built)}
    except GreenroomError as error:
        known = (each.__name__ for each in type(error).__mro__ if each.__name__ in ERRORS_BY_KIND)
        return {"kind": next(known), "error": str(error)}


def main() -> None:
    """Answer what is asked on stdin."""
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:  # what anything prints goes to stderr
        os.dup2(2, 1)
        json.dump(applied(asked["document"], asked["user"]), answer)


if __name__ == "__main__":
    main()
