"""Greenroom side by side with its peers: `benchmarks.http` for speed, `.survival` for kills.

Every system runs alone, in a virtual environment and a process tree of its own, on 127.0.0.1 only.
"""

from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
APPS = CLONE / "benchmarks" / "apps"
ECHO = {"name": "x", "value": 1}


class BenchmarkError(Exception):
    """Something outside the measured systems' speed went wrong; the text says what to do."""
