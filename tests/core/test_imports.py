"""The folders of core/ import in one direction."""

from __future__ import annotations

from greenroom import core
from tests.support.imports import folders_in_order


def test_no_folder_imports_one_that_imports_it() -> None:
    order = folders_in_order(core)
    assert order.index("lifecycle") < order.index("rollouts") < order.index("cluster")
