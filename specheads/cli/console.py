"""What a person sees: live progress on a terminal, quiet lines elsewhere, and one line for an error.

Everything for people goes to ``stream`` (stderr where stdout carries JSON); a rank other than 0 prints nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json import dumps as json_text
from typing import Any, TextIO

LINE_SECONDS = 10.0  # between two lines of one stage where the output is not a terminal


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def describe(fields: dict[str, Any]) -> str:
    """``loss 3.21  acceptance 0.31``: numbers shortened, names with blanks, nothing for None."""
    shown = []
    for name, value in fields.items():
        if value is None:
            continue
        if isinstance(value, float):
            value = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        label = name.replace("_per_s", "/s").replace("_", " ")
        shown.append(f"{value} {label}" if label.endswith("/s") else f"{label} {value}")
    return "  ".join(shown)


class StageProgress:
    """One stage's progress: rate and time left are worked out here, so that callers only count."""

    def __init__(self, name: str, show: Callable[[float | None, str], None]) -> None:
        self.name = name
        self._show = show
        self.started = time.perf_counter()
        self.fields: dict[str, Any] = {}

    def __call__(self, done: float, total: float | None = None, **fields: Any) -> None:
        """``tokens`` (so far) becomes tokens/s, ``seconds_left`` replaces the estimate, other fields are shown."""
        elapsed = time.perf_counter() - self.started
        tokens, left = fields.pop("tokens", None), fields.pop("seconds_left", None)
        if tokens and elapsed > 0:
            fields = {"tokens_per_s": tokens / elapsed, **fields}
        self.fields.update(fields)
        share = min(done / total, 1.0) if total else None
        text = describe(self.fields)
        if left is None and share:
            left = elapsed / share * (1 - share)
        if left is not None:
            text += f"  time left {clock(left)}"
        self._show(share, text.strip())


class Console:
    """Output for people. ``json``: stdout is a program's, so people read stderr."""

    def __init__(self, json: bool = False, stream: TextIO | None = None) -> None:
        from rich.console import Console as RichConsole

        self.stream = stream or (sys.stderr if json else sys.stdout)
        self.silent = int(os.environ.get("RANK", "0")) > 0
        self.rich = RichConsole(file=self.stream, highlight=False, soft_wrap=not self.stream.isatty())
        self.live = self.rich.is_terminal and not self.silent

    def line(self, text: str = "") -> None:
        """One line."""
        if not self.silent:
            self.rich.print(text, markup=False)
            self.stream.flush()

    @contextmanager
    def stage(self, name: str) -> Iterator[StageProgress]:
        """Progress of a named stage: a live bar on a terminal, else a line at the end and one every ten seconds."""
        started = time.perf_counter()
        if self.live:
            with self._bar(name) as progress:
                yield progress
        else:
            shown = [started]

            def show(share: float | None, text: str) -> None:
                if time.perf_counter() - shown[0] >= LINE_SECONDS:
                    shown[0] = time.perf_counter()
                    self.line(f"{name}: {f'{share:.0%}  ' if share is not None else ''}{text}".rstrip(": "))

            progress = StageProgress(name, show)
            yield progress
        tail = describe(progress.fields)
        self.line(f"{name}: done in {clock(time.perf_counter() - started)}{'  ' + tail if tail else ''}")

    @contextmanager
    def _bar(self, name: str) -> Iterator[StageProgress]:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=self.rich, transient=True) as bar:
            task = bar.add_task(name, total=None, text="")

            def show(share: float | None, text: str) -> None:
                bar.update(task, total=None if share is None else 1.0, completed=share or 0.0, text=text)

            yield StageProgress(name, show)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
        """A table; numbers stand right."""
        from rich.table import Table
        from rich.text import Text  # what a file or a person wrote may hold [brackets], which are no markup

        if self.silent:
            return
        table = Table(title=Text(title) if title else None)
        for index, column in enumerate(columns):
            numeric = rows and all(isinstance(row[index], (int, float)) for row in rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(Text(_cell(value)) for value in row))
        self.rich.print(table)

    def draw(self, picture: Callable[[Any], None]) -> None:
        """Let ``picture`` print on the rich console."""
        if not self.silent:
            picture(self.rich)

    def json(self, value: Any) -> None:
        """The machine-readable answer, alone on stdout."""
        if not self.silent:
            sys.stdout.write(json_text(value, ensure_ascii=False, indent=2) + "\n")
            sys.stdout.flush()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def report_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write("error: " + " ".join(text.split()) + "\n")
    sys.stderr.flush()
