"""What a constructor does to its process, as a deploy reports it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

import pytest

from greenroom import serve
from greenroom.serve.deployments import Application
from greenroom.serve.exceptions import GreenroomError
from greenroom.serve.handle import DeploymentHandle

Deployed = Callable[[Application], DeploymentHandle]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        (
            "os._exit(3)",
            "exit code 3; its log ends with: loading | no weights; see:",
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_constructor_that_ends_its_process_fails_the_deployment(
    deployed, running, name, how, message
):
    @serve.deployment(max_constructor_retry_count=1)
    class Ends:
        def __init__(self) -> None:
            print("loading\nno weights", flush=True)
            exec(how, {"sys": sys, "os": os})

        def __call__(self) -> None: ...

    with pytest.raises(GreenroomError, match=re.escape(message)):
        deployed(Ends.bind())
    application = running.status()["applications"][name]
    assert application["status"] == "DEPLOY_FAILED"
    assert message in application["message"]
