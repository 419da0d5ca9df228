"""The command line options and the clean-up that both benchmarks share."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import BenchmarkError
from benchmarks.systems import GREENROOM, PEERS, System
from benchmarks.venvs import Venv, default_root, existing_greenroom, prepare_greenroom, prepare_peer


def _peers(text: str) -> list[System]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(
                f"no peer is called {name!r}; there are {', '.join(PEERS)}"
            )
    return [PEERS[name] for name in names]


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parser(
    name: str, description: str, peers: Callable[[str], list[System]] = _peers
) -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    add = shared.add_argument
    add("--peers", type=peers, default=[], metavar="A,B", help="whom to measure beside")
    add("--skip-greenroom", action="store_true", help="measure the peers alone")
    add("--greenroom-python", type=Path, metavar="FILE", help="an interpreter that has Greenroom")
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    add(
        "--venvs",
        type=Path,
        default=default_root(),
        metavar="DIR",
        help="where the virtual environments are kept (%(default)s)",
    )
    return shared


def prepare(options: argparse.Namespace) -> dict[System, Venv]:
    """Return the systems to measure, Greenroom first, each with its environment ready."""
    venvs: dict[System, Venv] = {}
    root = options.venvs.absolute()
    root.mkdir(parents=True, exist_ok=True)
    builds: dict[tuple[str, ...], Venv] = {}  # of Greenroom, by what is installed beside it
    if options.greenroom_python and not options.skip_greenroom:
        venvs[GREENROOM] = existing_greenroom(options.greenroom_python)
    elif not options.skip_greenroom:
        venvs[GREENROOM] = builds[GREENROOM.requirements] = prepare_greenroom(root)
    for peer in options.peers:
        if not peer.is_greenroom:
            venvs[peer] = prepare_peer(peer, root)
            continue
        if peer.requirements not in builds:
            builds[peer.requirements] = prepare_greenroom(root, peer)
        venvs[peer] = builds[peer.requirements]
    if not venvs:
        raise BenchmarkError("--skip-greenroom without --peers leaves nothing to measure")
    return venvs


def run_main(main: Callable[[], int]) -> None:
    """Run a benchmark; on SIGTERM unwind as on Ctrl-C, so that everything started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code = main()
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted; all that was started has been ended", file=sys.stderr)
        code = 130
    sys.exit(code)
