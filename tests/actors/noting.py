"""User code that notes what happens to it in a file, and how a test waits for such notes."""
# No postponed annotations: what FastAPI resolves in the replica may inherit from this.

from pathlib import Path

from tests.support.systems import wait_until

DEADLINE_S = 30


class Noting:
    """A deployment's class; ``folder`` is where it and the test meet."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def note(self, text: str) -> None:
        with (self.folder / "notes").open("a") as notes:
            notes.write(f"{text}\n")


def wait_for_notes(folder: Path, beginning: str, count: int = 1) -> list[str]:
    """Wait for notes that begin so; return the rests of those there are."""

    def found() -> list[str] | None:
        notes = folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        rests = [line[len(beginning) :] for line in lines if line.startswith(beginning)]
        return rests if len(rests) >= count else None

    result: list[str] = wait_until(found, DEADLINE_S, f"a note {beginning!r}")
    return result
