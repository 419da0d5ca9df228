"""Run Thespian's own tests against our system base, or the stock one, and count.

    python tests/thespian/run_upstream.py --base ours [--part 1/4] [pytest arguments]

The tests come with the source archive of the installed version on PyPI, which is fetched once into
a cache folder; nothing of it is copied into this repository.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = "thespian/test"


def main() -> int:
    """Fetch, run, print the counts; the exit code is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", choices=("stock", "ours"), default="ours")
    parser.add_argument("--part", default="1/1", help="which of how many parts, such as 2/4")
    parser.add_argument("--cache", type=Path, default=_cache_folder())
    options, pytest_arguments = parser.parse_known_args()
    tests = fetch(options.cache, version("thespian"))
    number, parts = map(int, options.part.split("/"))
    files = sorted(tests.glob("test_*.py"))[number - 1 :: parts]
    if any("test_" in argument for argument in pytest_arguments):
        files = []
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "-p", "no:cacheprovider"),
        *("-c", os.devnull, "--rootdir", str(tests.parent.parent), "--timeout=180"),
        *("--import-mode=importlib", "-o", "python_files=test_*.py", "--tb=short", "-rfE"),
        *map(str, files),
        *pytest_arguments,
    ]
    print(f"Thespian {version('thespian')}, base: {options.base}, part {options.part}", flush=True)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests.parent.parent), str(HERE)]),
        "UPSTREAM_BASE": options.base,
        "THESPLOG_FILE_MAXSIZE": "0",
        "THESPIAN_BASE_IPADDR": "127.0.0.1",
    }
    result = subprocess.run(
        command,
        cwd=tests.parent.parent,
        env=environ,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(result.stdout)
    last = result.stdout.rstrip().rpartition("\n")[2]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("errors", 0)
    print(f"{options.base}: {passed} pass, {failed} fail, {counts.get('skipped', 0)} skip")
    return result.returncode


def fetch(cache: Path, release: str) -> Path:
    """Return the folder of the tests of ``release``, fetched when the cache has it not."""
    folder = cache / f"thespian-{release}"
    if not (folder / TESTS).is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "thespian", "--dest", str(cache), f"thespian=={release}"]
        subprocess.run(command, check=True)
        with tarfile.open(cache / f"thespian-{release}.tar.gz") as archive:
            archive.extractall(cache, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    return folder / TESTS


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "understudy-upstream"


if __name__ == "__main__":
    sys.exit(main())
