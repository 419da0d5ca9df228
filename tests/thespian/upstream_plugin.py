"""A pytest plugin that runs Thespian's own tests over our system base; see run_upstream.py.

Their fixture ``asys`` is parametrised with the names of bases, which Thespian imports by name; our
base is put in the place of the name that it replaces.
"""

import itertools
import os
import random
import sys

from thespian import test as thespian_tests

from greenroom.actors.transport import thespian_base

sys.modules["thespian.system.multiprocTCPBase"] = thespian_base


def pytest_collection_modifyitems(config, items):
    """Leave out what runs on other bases, or on routing that only their TCP base has."""
    left_out = [item for item in items if not _is_about_the_base(item)]
    items[:] = [item for item in items if _is_about_the_base(item)]
    config.hook.pytest_deselected(items=left_out)


def _is_about_the_base(item):
    return "multiprocTCPBase" in item.name and "-AdminRouting" not in item.name


# Theirs draws any port that nobody listens at in TCP: two processes may draw the same at once, and
# a system on our base is not seen.
_first, _end = map(int, os.environ["UPSTREAM_PORTS"].split("-"))
_start = random.randrange(_first, _end)
_ports = itertools.cycle([*range(_start, _end), *range(_first, _start)])


def free_admin_port():
    """Return a port of this process's share that no admin has."""
    return next(port for port in _ports if _is_free(port))


def _is_free(port):
    transport = thespian_base.Transport
    return not transport.probeAdmin(transport.getAdminAddr({"Admin Port": port}))


thespian_tests.get_free_admin_port = free_admin_port
