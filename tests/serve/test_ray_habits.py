"""What code that was written for Ray Serve relies on beyond the API."""

import pytest

from tests.support.programs import python

STARLETTE = """
import starlette
from greenroom import serve

@serve.deployment
class Model:
    async def __call__(self, request: starlette.requests.Request) -> starlette.responses.Response:
        return starlette.responses.PlainTextResponse(request.url.path)

app = Model.bind()
"""


LOAD = """
import pathlib, sys
from greenroom.serve.code.importing import load_application
app = load_application("mine", pathlib.Path(sys.argv[1]), {})
"""
BUILD = (
    LOAD
    + """
from greenroom.serve.build import build
pathlib.Path(sys.argv[2]).write_bytes(build(app, "a").deployments[0].code)
"""
)
REPLICA = """
import pathlib, sys
from greenroom.actors.replica.user_code import UserCode
code = UserCode()
code.start()
failure = code.load(pathlib.Path(sys.argv[1]).read_bytes(), None).result(20)
assert failure is None, failure
assert {'starlette.requests', 'starlette.responses'} <= set(sys.modules)
code.end()
"""


def test_import_starlette_alone_is_enough_in_a_script():
    python("-c", STARLETTE)


def test_import_starlette_alone_is_enough_in_a_module_that_a_command_loads(app_dir):
    (app_dir / "models.py").write_text(
        "import starlette\ndef path(request: starlette.requests.Request): return request.url.path\n"
    )
    (app_dir / "mine.py").write_text("import models\n" + STARLETTE)
    python("-c", LOAD, app_dir)


@pytest.mark.slow
def test_import_starlette_alone_is_enough_in_a_replica(app_dir, tmp_path):
    (app_dir / "mine.py").write_text(STARLETTE)
    python("-c", BUILD, app_dir, tmp_path / "code")
    python("-c", REPLICA, tmp_path / "code")
