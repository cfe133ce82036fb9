"""Small things every floor needs: the error a user sees, and writes that never leave half a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")


class InputError(ValueError):
    """Something that came from outside is wrong: one line that names the field, what came, what was expected and
    what to do next. The command line prints it and exits with code 2."""


def disk_error(path: Path, error: OSError) -> InputError:
    """An ``OSError`` of a write as the line a user can act on."""
    return InputError(
        f"{path}: could not be written ({error.strerror or error}); what was there before is untouched. "
        "Free some space or choose another output folder"
    )


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; renamed to ``path`` at the end, removed after an error.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    goal = Path(path)
    temporary: Path | None = None
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{goal.name}.", suffix=".part", dir=goal.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(goal)
    except OSError as error:
        raise disk_error(goal, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def spread(items: Sequence[Item], limit: int | None) -> list[Item]:
    """``limit`` items at even distances (None: all), the same ones every time: each part of a list has its share."""
    count = len(items) if limit is None else min(limit, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def check_writable(path: Path) -> None:
    """Try whether ``path`` could be written, leaving nothing but its folder.

    Raises:
        InputError: it is a folder, or its own folder cannot be made or written to.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder, expected the name of a file to write; add one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise disk_error(path, error) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole text file, or leave the old one."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a whole JSON file, or leave the old one."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
