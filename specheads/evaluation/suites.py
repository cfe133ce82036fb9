"""Benchmark suites: prompts with a category, from the package or from a JSONL file.

Rows of a file, one a line, in either form (Spec-Bench and MT-bench fit the first)::

    {"id": "mt/81", "suite": "mt_bench", "category": "writing", "turns": ["Compose a post ...", "Rewrite it ..."]}
    {"id": "own-1", "category": "code", "messages": [{"role": "user", "content": "Sort a list in C."}]}

``turns`` are user turns: each later one is asked after the target's own answer to the one before, and every system
under test gets that same conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.data.conversations import Message, clean_turns, read_jsonl, read_prompts, trim
from specheads.utils import InputError, spread

BUILTIN = "heldout"


@dataclass(frozen=True)
class SuitePrompt:
    """One conversation to be answered. ``later_turns``: user turns that follow the target's answer."""

    id: str
    suite: str
    category: str
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()


def load_suite(source: str | Path, *, per_category: int | None = None) -> list[SuitePrompt]:
    """The prompts of ``"heldout"`` (shipped, never trained on) or of a JSONL file.

    ``per_category``: at most so many prompts of each category, spread evenly over the suite's own order.

    Raises:
        InputError: no such suite or file, a broken row (file:line), or an id used twice.
    """
    if per_category is not None and per_category < 1:
        raise InputError(f"per_category: got {per_category}, expected 1 or more; leave it out for the whole suite")
    if str(source) == BUILTIN:
        rows = [SuitePrompt(row.id, BUILTIN, row.category, row.messages) for row in read_prompts("builtin-heldout")[0]]
    else:
        path = Path(source)
        if not path.is_file():
            raise InputError(
                f"suite: got {str(source)!r}, expected {BUILTIN!r} or a JSONL file of prompts; check the path"
            )
        rows = _read(path)
    groups: dict[str, list[SuitePrompt]] = {}
    for row in rows:
        groups.setdefault(row.category, []).append(row)
    kept = {row.id for members in groups.values() for row in spread(members, per_category)}
    return [row for row in rows if row.id in kept]


def _read(path: Path) -> list[SuitePrompt]:
    rows: list[SuitePrompt] = []
    places: dict[str, int] = {}
    for number, value in read_jsonl(path):
        row = _row(value, f"{path}:{number}", path.name.split(".")[0])
        if row.id in places:
            raise InputError(f"{path}:{number}: id {row.id!r} is on line {places[row.id]} too; ids must be unique")
        places[row.id] = number
        rows.append(row)
    if not rows:
        raise InputError(f"suite {path}: the file is empty; expected one JSON object with 'turns' or 'messages' a line")
    return rows


def _row(value: dict[str, Any], where: str, default_suite: str) -> SuitePrompt:
    if not isinstance(value.get("id"), (str, int)):
        raise InputError(f"{where}: 'id' is {value.get('id')!r}, expected a text or a number; give every row one")
    name, suite = str(value["id"]), str(value.get("suite", default_suite))
    category = str(value.get("category", "other"))
    if "turns" in value:
        turns = value["turns"]
        usable = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)
        if not usable:
            raise InputError(f"{where}: 'turns' is {str(turns)[:60]!r}, expected a list of texts; mend that row")
        return SuitePrompt(name, suite, category, ({"role": "user", "content": turns[0]},), tuple(turns[1:]))
    messages = value.get("messages")
    if not isinstance(messages, list) or not all(_is_turn(turn) for turn in messages):
        raise InputError(
            f"{where}: expected 'turns' (texts) or 'messages' ({{role, content}}), got the keys {sorted(value)}; "
            "mend that row"
        )
    asked = trim(clean_turns(messages), ("user", "tool"))
    if not any(turn["role"] == "user" for turn in asked):
        raise InputError(f"{where}: no user turn with text in 'messages'; there is nothing to answer, delete that row")
    return SuitePrompt(name, suite, category, tuple(asked))


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
