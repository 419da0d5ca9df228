"""A pytest plugin that runs Thespian's own tests over the base under test; see run_upstream.py.

Their fixture ``asys`` is parametrised with the names of bases, which Thespian imports by name; our
base is put in the place of the name that it replaces.
"""

import os
import sys

BASE = os.environ.get("UPSTREAM_BASE", "ours")
NAMED = "thespian.system.multiprocTCPBase"

if BASE == "ours":
    from understudy.actors.transport import base

    sys.modules[NAMED] = base


def pytest_collection_modifyitems(config, items):
    """Leave out what runs on other bases, or on routing that only their TCP base has."""
    left_out = [item for item in items if not _is_about_the_base(item)]
    items[:] = [item for item in items if _is_about_the_base(item)]
    config.hook.pytest_deselected(items=left_out)


def _is_about_the_base(item):
    return "multiprocTCPBase" in item.name and "-AdminRouting" not in item.name
