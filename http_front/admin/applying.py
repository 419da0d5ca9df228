"""A process that deploys one document for an HTTP worker, or plans to, and ends.

It is given the document's text, its kind (json or yaml), who asks for it, and the flags, as of
:class:`DeployFlags`. It answers with ``{"answer": ...}`` or ``{"kind": ..., "error": ...}``. User
code is imported here, as ``greenroom deploy`` does: what it prints goes to the worker's log, and
what it starts is killed with this process's group.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime.forking import share_memory
from greenroom.actors.runtime.records import show_title
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import ERRORS_BY_KIND, GreenroomError
from greenroom.core.operations import DeployFlags
from greenroom.serve.admin import applications, declarative
from greenroom.serve.config_file import ConfigFile
from greenroom.serve.schema import read_document


def applied(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Deploy a document in the name of its user, or plan to; return what to answer."""
    try:
        # The environment here is the server's: none of its variables are for who may deploy.
        file = ConfigFile(Path(f"body.{asked['kind']}"), {}, asked["text"])
        # Modules are installed, or in a working_dir.
        with tempfile.TemporaryDirectory() as nothing, file.located():
            document, folder = read_document(file.document), Path(nothing)
            built = declarative.build_document(document, folder, None, folder)
        with contextlib.closing(Connection.open(read_settings(), user=asked["user"])) as connection:
            flags = DeployFlags(**asked["flags"])
            return {"answer": applications.apply(connection, built, flags, from_file=True)}
    except GreenroomError as error:
        known = (each.__name__ for each in type(error).__mro__ if each.__name__ in ERRORS_BY_KIND)
        return {"kind": next(known), "error": str(error)}


def main(fd: str) -> None:
    """Answer what is asked in a file, in place of that."""
    os.setsid()  # what user code starts ends with this process
    show_title("deploying")  # it may have been forked from a worker, and is none
    share_memory()
    with os.fdopen(int(fd), "r+") as file:
        file.seek(0)
        asked = json.load(file)
        answer = applied(asked)
        file.seek(0)
        file.truncate()
        json.dump(answer, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of user code may never end
