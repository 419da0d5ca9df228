"""What commands show while they wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

QUIET_S = 1.0  # what takes less needs no progress


class Progress:
    """Shows on stderr what is being waited for, once it has taken over a second.

    On a terminal that is Rich's progress, which is removed at the end; elsewhere it is a line for
    each text. There is no thread before there is a text, and Rich is not imported within the first
    second.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self._is_shown = False  # between __enter__ and __exit__
        self._timer = threading.Timer(QUIET_S, self._show)
        self._timer.name, self._timer.daemon = "progress", True

    def say(self, text: str) -> None:
        """Change the text; callable from any thread."""
        with self._lock:
            is_new, self._text = text != self._text, text
            if self._bar is not None and is_new:
                self._print(self._bar)
            elif self._is_shown:
                self._begin()

    def __enter__(self) -> Self:
        with self._lock:
            self._is_shown = True
            if self._text:
                self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_shown = False
            if self._bar is not None and self._bar.live.is_started:
                self._bar.stop()
        if self._timer.ident is not None:
            self._timer.join()

    def _begin(self) -> None:
        if self._timer.ident is None:
            self._timer.start()

    def _show(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, TimeElapsedColumn())
        bar = Bar(*columns, console=Console(stderr=True), transient=True)
        with self._lock:
            if self._is_shown:
                bar.add_task(self._text, total=None)
                if bar.console.is_terminal:
                    bar.start()
                self._bar = bar
                self._print(bar)

    def _print(self, bar: Bar) -> None:
        if bar.console.is_terminal:
            bar.update(bar.task_ids[0], description=self._text)
        else:
            bar.console.print(f"{self._text} ...", markup=False, highlight=False, soft_wrap=True)
