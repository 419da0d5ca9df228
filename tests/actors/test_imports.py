"""The folders of actors/ import in one direction."""

from greenroom import actors
from tests.support.imports import folders_in_order


def test_no_folder_imports_one_that_imports_it():
    order = folders_in_order(actors)
    assert order.index("transport") < order.index("runtime") < order.index("caller")
    assert order.index("replica") < order.index("controller") < order.index("host")
