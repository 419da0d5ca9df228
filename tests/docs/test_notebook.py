"""serve.run in a notebook, whose cells run on an event loop."""

from __future__ import annotations

import os

import nbclient
import nbformat
import pytest

from tests.support.systems import running_system

pytestmark = pytest.mark.slow

CELLS = [
    """
from greenroom import serve

@serve.deployment
class Product:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, number):
        return self.factor * number

handle = serve.run(Product.bind(2), name="notebook", route_prefix=None)
await handle.remote(4)
""",
    # The cell again, with a change
    """
handle = serve.run(Product.bind(3), name="notebook", route_prefix=None)
await handle.remote(4)
""",
    "handle.remote(4).result()",
    "serve.delete('notebook')",
]


LOADS = """
@serve.deployment
class Loads:
    def __init__(self):
        raise FileNotFoundError("weights.bin")

serve.run(Loads.bind(), name="loads", route_prefix=None)
"""


@pytest.fixture
def running(tmp_path):
    with running_system(tmp_path / "state") as system:
        yield system


@pytest.mark.filterwarnings("ignore")  # of jupyter's own
def test_cells_deploy_call_and_change(running, monkeypatch):
    for name, value in running.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in [*CELLS, LOADS]]
    )
    nbclient.NotebookClient(notebook, timeout=60, allow_errors=True).execute(cwd=os.getcwd())
    first, second, blocked, deleted, failed = (cell.outputs for cell in notebook.cells)
    assert first[0]["data"]["text/plain"] == "8"
    assert second[0]["data"]["text/plain"] == "12"
    assert "would block the running event loop; await the response" in blocked[0]["evalue"]
    assert deleted == []
    assert failed[-1]["ename"] == "FileNotFoundError"
    assert "weights.bin" in failed[-1]["evalue"]
