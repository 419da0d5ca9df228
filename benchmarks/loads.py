"""Load from wrk: one thread, so that on two cores it leaves one to the system under test."""

import json
import shutil
import subprocess

from benchmarks import CLONE, BenchmarkError

SCRIPT = CLONE / "benchmarks" / "post.lua"
NO_WRK = "wrk is not installed; on Debian and Ubuntu: sudo apt-get install wrk"


def require_wrk() -> None:
    if shutil.which("wrk") is None:
        raise BenchmarkError(NO_WRK)


def load(url: str, *, connections: int, seconds: int, new_heads: bool = False) -> dict[str, float]:
    """POST the echo as fast as answers come; return rate, latencies in ms, and errors.

    With ``new_heads`` no two requests have the same head.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s"]
    done = subprocess.run(
        [*command, "-s", str(SCRIPT), url, *(["--", "new"] if new_heads else [])],
        capture_output=True,
        text=True,
        timeout=seconds + 30,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"wrk failed: {done.stdout}{done.stderr}")
    counted = json.loads(done.stdout.splitlines()[-1])
    answered_well = counted["requests"] - counted["non_2xx"]
    return {
        "requests_per_s": answered_well / (counted["duration_us"] / 1e6),
        "p50_ms": counted["p50_us"] / 1000,
        "p99_ms": counted["p99_us"] / 1000,
        "requests": counted["requests"],
        "non_2xx": counted["non_2xx"],
        "socket_errors": counted["socket_errors"],
    }
