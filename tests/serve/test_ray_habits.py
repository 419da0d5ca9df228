"""What code that was written for Ray Serve relies on beyond the API."""

import subprocess
import sys

import pytest

STARLETTE = """
import starlette
from greenroom import serve

@serve.deployment
class Model:
    async def __call__(self, request: starlette.requests.Request) -> starlette.responses.Response:
        return starlette.responses.PlainTextResponse(request.url.path)

app = Model.bind()
"""


def run(source, *arguments):
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def test_import_starlette_alone_is_enough_in_a_script():
    result = run(STARLETTE)
    assert result.returncode == 0, result.stderr


def test_import_starlette_alone_is_enough_in_a_module_that_a_command_loads(app_dir):
    (app_dir / "models.py").write_text(
        "import starlette\ndef path(request: starlette.requests.Request): return request.url.path\n"
    )
    (app_dir / "mine.py").write_text("import models\n" + STARLETTE)
    source = (
        "import pathlib, sys; from greenroom.serve.code.importing import load_application as load\n"
        "load('mine', pathlib.Path(sys.argv[1]), {})"
    )
    result = run(source, str(app_dir))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_import_starlette_alone_is_enough_in_a_replica(app_dir, tmp_path):
    (app_dir / "mine.py").write_text(STARLETTE)
    stored = tmp_path / "code"
    build = (
        "import pathlib, sys; from greenroom.serve.code.importing import load_application as load\n"
        "from greenroom.serve.build import build\n"
        "built = build(load('mine', pathlib.Path(sys.argv[1]), {}), 'a')\n"
        "pathlib.Path(sys.argv[2]).write_bytes(built.deployments[0].code)"
    )
    assert run(build, str(app_dir), str(stored)).returncode == 0
    replica = (
        "import pathlib, sys\n"
        "from greenroom.actors.replica.user_code import UserCode\n"
        "code = UserCode()\n"
        "code.start()\n"
        "failure = code.load(pathlib.Path(sys.argv[1]).read_bytes(), None).result(20)\n"
        "assert failure is None, failure\n"
        "assert {'starlette.requests', 'starlette.responses'} <= set(sys.modules)\n"
        "code.end()"
    )
    result = run(replica, str(stored))
    assert result.returncode == 0, result.stderr
