"""What a job tells while it works. The command line's console is one such screen; a library caller needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Progress(Protocol):
    """Work done so far out of ``total``; ``tokens`` (so far) becomes tokens/s, other fields are shown as they come."""

    def __call__(self, done: float, total: float | None = None, **fields: Any) -> None:
        """Report."""


class Screen(Protocol):
    """Lines, stages with progress, tables."""

    def line(self, text: str = "") -> None:
        """One line."""

    def stage(self, name: str) -> Any:
        """Context manager that gives the stage's ``Progress``."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
        """A table."""

    def draw(self, picture: Callable[[Any], None]) -> None:
        """Let ``picture`` print on a rich console."""

    def json(self, value: Any) -> None:
        """Machine-readable values on stdout."""


class NoScreen:
    """Shows nothing."""

    def line(self, text: str = "") -> None:
        """Nothing."""

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """A progress that goes nowhere."""

        def ignore(done: float, total: float | None = None, **fields: Any) -> None:
            return

        yield ignore

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
        """Nothing."""

    def draw(self, picture: Callable[[Any], None]) -> None:
        """Nothing."""

    def json(self, value: Any) -> None:
        """Nothing."""
