"""Stages that are done once: a marker with a fingerprint of the inputs says whether, and why it is believed.

    <output>/stages/<name>.json   {"stage", "fingerprint", "inputs", "products", "result", "seconds", "finished"}

A stage is reused when its inputs are the same and the files it made still stand. Its marker is written last, so a
stage that was interrupted has none and runs again; what it had written by then is its own business to continue.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specheads.build import AUTO_FILE
from specheads.jobs.screen import Screen
from specheads.utils import InputError, write_json


def fingerprint(value: Any) -> str:
    """A short digest of JSON-able values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def file_digest(path: str | Path) -> str:
    """A short digest of a file's bytes, ``absent`` without one."""
    path = Path(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "absent"


def clear(folder: Path, names: Sequence[str]) -> None:
    """Remove what earlier runs left in ``folder`` under ``names``.

    Raises:
        InputError: something is there, but nothing says that a run of ours made it.
    """
    there = [name for name in names if (folder / name).exists()]
    # what auto meant is written before a target is loaded, so it says nothing of what else is there
    auto = folder / AUTO_FILE
    markers = [path for path in (folder / "stages").glob("*.json") if path != auto]
    there = [name for name in there if name != "stages" or markers]
    ours = (folder / "run.json").is_file() or bool(markers)
    if there and not ours:
        raise InputError(
            f"--fresh: {folder} holds {there[0]}, but neither run.json nor stages/*.json, so no quickstart made it; "
            "choose another folder with --output, or remove it yourself"
        )
    for name in there:
        shutil.rmtree(folder / name, ignore_errors=True)
    auto.unlink(missing_ok=True)  # also where a failed start left nothing else


class Stages:
    """The stages of one output folder."""

    def __init__(self, folder: str | Path, screen: Screen) -> None:
        self.folder = Path(folder) / "stages"
        self.screen = screen
        self.ran: list[str] = []
        self.reused: list[str] = []

    def read(self, name: str) -> dict[str, Any] | None:
        """The marker of a stage; None where there is none, or a damaged one."""
        try:
            marker = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return marker if isinstance(marker, dict) and {"fingerprint", "inputs", "result"} <= set(marker) else None

    def run(
        self,
        name: str,
        inputs: dict[str, Any],
        work: Callable[[], Any],
        products: Sequence[str | Path] = (),
    ) -> Any:
        """The stage's JSON-able result: of ``work()``, or of an earlier run with the same ``inputs``.

        ``products``: files and folders that the stage makes; one that is missing makes it run again.
        """
        # through JSON, so that a tuple and the list it comes back as are the same input
        inputs = json.loads(json.dumps(inputs, default=str))
        marker = self.read(name)
        missing = [str(path) for path in products if not Path(path).exists()]
        if marker is not None and marker["fingerprint"] == fingerprint(inputs) and not missing:
            when = str(marker.get("finished", "?"))[:16].replace("T", " ")
            same = f"same {', '.join(inputs)}" if inputs else "it has no inputs"
            self.screen.line(f"{name}: done, reused ({same}; fingerprint {marker['fingerprint']}, made {when})")
            self.reused.append(name)
            return marker["result"]
        if marker is not None:
            self.screen.line(f"{name}: again, since {_difference(marker['inputs'], inputs, missing)}")
        start = time.perf_counter()
        result = json.loads(json.dumps(work(), default=str))
        write_json(
            self.folder / f"{name}.json",
            {
                "stage": name,
                "fingerprint": fingerprint(inputs),
                "inputs": inputs,
                "products": [str(path) for path in products],
                "result": result,
                "seconds": round(time.perf_counter() - start, 2),
                "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            },
        )
        self.ran.append(name)
        return result


def _short(value: Any) -> str:
    """A value for a line of text: long ones as their digest."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"#{fingerprint(value)}"


def _difference(old: dict[str, Any], new: dict[str, Any], missing: Sequence[str]) -> str:
    """What changed, in words."""
    if missing:
        return f"{missing[0]} is gone"
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    first = keys[0] if keys else "the inputs"
    before, after = old.get(first), new.get(first)
    if isinstance(before, dict) and isinstance(after, dict):
        inner = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        first, before, after = f"{first}.{inner[0]}", before.get(inner[0]), after.get(inner[0])
    return f"{first} changed from {_short(before)} to {_short(after)}"
