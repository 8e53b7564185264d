"""Shows the progress of the start: bars on a terminal, otherwise one line per phase."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StartupDisplay:
    """A context manager. `show` accepts any phases in any order."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._began_s: dict[str, float] = {}

    def __enter__(self) -> "StartupDisplay":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def show(self, phase: str, done: int, total: int) -> None:
        if self._console.is_terminal:
            self._show_bar(phase, done, total)
        else:
            self._show_line(phase, done, total)

    def _show_bar(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done, total=total)

    def _show_line(self, phase: str, done: int, total: int) -> None:
        began_s = self._began_s.setdefault(phase, time.monotonic())
        if done >= total:
            took_s = time.monotonic() - began_s
            self._console.print(f"{phase}: {done} of {total} in {took_s:.1f} s", highlight=False, markup=False)
