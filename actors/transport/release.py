"""Which versions this process runs, that must be the same on all hosts of a cluster.

Messages are pickles, and user code travels as bytecode: another minor version of Python cannot run
it, and another release of Greenroom has other messages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys


@functools.cache
def own_release() -> str:
    """Return the versions of Greenroom and Python, as both sides of a refusal name them."""
    version = importlib.metadata.version("greenroom")
    return f"greenroom {version}, Python {sys.version_info.major}.{sys.version_info.minor}"
