"""Prompts and answered rows from JSONL files, strictly read: what cannot be used is an error or a counted skip.

One row a line, in either form::

    {"id": "qa-17", "category": "qa", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    {"prompt": "Why is the sky blue?"}

Policy for the turns of a row, in this order:

1. turns without text (and without tool calls) are dropped;
2. assistant turns before the first user turn are dropped;
3. neighbouring user turns, and neighbouring assistant turns, are merged with a blank line between them;
4. a *prompt* ends with the last user (or tool) turn: the answer behind it, if any, is dropped, for the target will
   write its own; an *answered row* ends with the last assistant turn.

A row left without a user turn, or with an unknown role, is skipped and counted by its reason.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specheads.utils import InputError

ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, Any]  # role, content and, for tools, what the template needs


class Skipped(Counter[str]):
    """Rows that were left out, counted by reason; reports show it whole."""

    def describe(self) -> str:
        """One line, most frequent first; ``none`` when nothing was skipped."""
        return ", ".join(f"{count} {reason}" for reason, count in self.most_common()) or "none"


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: ``messages`` ends with a user (or tool) turn."""

    id: str
    category: str
    messages: tuple[Message, ...]


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every non-blank line of a ``.jsonl`` or ``.jsonl.gz`` file.

    Raises:
        InputError: the file is missing or unreadable, or a line is not a JSON object (named as file:line).
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a .jsonl file with one conversation a line") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: could not be read ({error}); give a readable .jsonl or .jsonl.gz file") from error
    except UnicodeDecodeError as error:
        line = (gzip.decompress(raw) if path.suffix == ".gz" else raw)[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    for number, record in enumerate(text.split("\n"), 1):
        if not record.strip():
            continue
        try:
            value = json.loads(record)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or endless nesting
            place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise InputError(
                f"{path}:{number}: broken JSON{place} ({getattr(error, 'msg', error)}); expected one JSON object a "
                "line. Mend or delete that line"
            ) from None
        if not isinstance(value, dict):
            raise InputError(f"{path}:{number}: got {type(value).__name__}, expected a JSON object with 'messages'")
        if "\\u" in record and _half_character(value):
            raise InputError(
                f"{path}:{number}: holds half a character (an unpaired \\ud800 to \\udfff), which is no text; mend or "
                "delete that line"
            )
        yield number, value


def _half_character(value: dict[str, Any]) -> bool:
    """Whether a text in it cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _messages(value: dict[str, Any], where: str) -> list[Message]:
    """The raw turns of a row, types checked."""
    if "messages" not in value and isinstance(value.get("prompt"), str):
        return [{"role": "user", "content": value["prompt"]}]
    messages = value.get("messages")
    if not isinstance(messages, list):
        raise InputError(
            f"{where}: 'messages' is {type(messages).__name__}, expected a list of {{role, content}}, or 'prompt' "
            f"with a text; the row has the keys {sorted(value)}"
        )
    for turn in messages:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise InputError(f"{where}: a turn is {json.dumps(turn)[:60]}, expected {{'role': ..., 'content': ...}}")
        content = turn.get("content")
        if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
            kind = type(content).__name__
            raise InputError(f"{where}: the content of a {turn['role']} turn is {kind}, expected text")
    return messages


def clean_turns(messages: list[Message]) -> list[Message]:
    """Steps 1 to 3 of the policy above. Turns with tool fields are never merged."""
    kept: list[Message] = []
    for turn in messages:
        text = turn.get("content") or ""
        if not text.strip() and not turn.get("tool_calls"):
            continue
        if turn["role"] == "assistant" and not any(other["role"] == "user" for other in kept):
            continue
        plain = set(turn) <= {"role", "content"}
        if kept and plain and turn["role"] == kept[-1]["role"] != "tool" and set(kept[-1]) <= {"role", "content"}:
            kept[-1] = {"role": turn["role"], "content": kept[-1]["content"] + "\n\n" + text}
        else:
            kept.append(dict(turn))
    return kept


def trim(messages: list[Message], last: tuple[str, ...]) -> list[Message]:
    """The turns up to the last one whose role is in ``last`` (none: an empty list)."""
    ends = [index for index, turn in enumerate(messages) if turn["role"] in last]
    return messages[: ends[-1] + 1] if ends else []


def _usable(value: dict[str, Any], where: str, last: tuple[str, ...], skipped: Skipped) -> list[Message]:
    """Cleaned turns that end in a role of ``last``, or an empty list with the reason counted."""
    messages = _messages(value, where)
    unknown = sorted({turn["role"] for turn in messages} - set(ROLES))
    if unknown:
        skipped[f"unknown role {unknown[0]!r}"] += 1
        return []
    turns = clean_turns(messages)
    kept = trim(turns, last)
    if not any(turn["role"] == "user" for turn in kept):
        empty = not any((turn.get("content") or "").strip() for turn in messages)
        asked = any(turn["role"] == "user" for turn in turns)
        skipped["empty" if empty else "no answer" if asked else "no user turn"] += 1
        return []
    return kept


def builtin_files(name: str) -> list[Path]:
    """The package's own prompt files: ``builtin`` (train_*.jsonl) or ``builtin-heldout`` (heldout_*.jsonl)."""
    folder = Path(str(resources.files("specheads.data.prompts")))
    return sorted(folder.glob("heldout_*.jsonl" if name == "builtin-heldout" else "train_*.jsonl"))


def builtin_answers(name: str = "smollm2-135m") -> Path | None:
    """The distilled set shipped for a target, or None when there is none."""
    path = Path(str(resources.files("specheads.data.prompts"))) / f"{name}.jsonl.gz"
    return path if path.exists() else None


def read_prompts(source: str | Path) -> tuple[list[Prompt], Skipped]:
    """Prompts of a JSONL file, or of ``"builtin"`` or ``"builtin-heldout"``, and what was skipped.

    A row without an ``id`` gets a digest of its turns (so an id does not move when lines are added).

    Raises:
        InputError: missing, empty or broken file (file:line), an id used twice, no usable row at all.
    """
    files = builtin_files(str(source)) if str(source) in ("builtin", "builtin-heldout") else [Path(source)]
    skipped, prompts, lines = Skipped(), [], 0
    places: dict[str, str] = {}
    for path in files:
        for number, value in read_jsonl(path):
            lines, where = lines + 1, f"{path}:{number}"
            messages = _usable(value, where, ("user", "tool"), skipped)
            if not messages:
                continue
            named = value.get("id") not in (None, "")
            name = str(value["id"]) if named else digest(messages)
            if name in places and named:
                raise InputError(f"{where}: id {name!r} is also the id of {places[name]}; ids must be unique")
            if name in places:
                skipped["repeated prompt"] += 1
                continue
            places[name] = where
            prompts.append(Prompt(name, str(value.get("category", "other")), tuple(messages)))
    if not prompts:
        what = f"no usable row in {lines} lines (skipped: {skipped.describe()})" if lines else "the file is empty"
        raise InputError(f"{source}: {what}; expected one JSON object with 'messages' or 'prompt' a line")
    return prompts, skipped


def _check_exact(value: dict[str, Any], where: str) -> None:
    """A row with exact ids must hold lists of ids, and say what was asked by ``prompt_ids`` or by its turns."""
    asked = value.get("prompt_ids") or []  # none where the turns tell what was asked
    for key, ids in (("output_ids", value["output_ids"]), ("prompt_ids", asked)):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"{where}: {key!r} is {json.dumps(ids)[:60]}, expected a list of token ids; mend the row")
    if value.get("messages") is not None:
        turns = _messages(value, where)
        if len(turns) > 1 and turns[-1]["role"] == "assistant":
            return
        if not asked:
            raise InputError(
                f"{where}: the turns do not end with an answer; add it to 'messages', or give 'prompt_ids'"
            )
    elif not asked:
        raise InputError(
            f"{where}: has 'output_ids' but neither 'prompt_ids' nor 'messages'; add what was asked "
            f"(the row has the keys {sorted(value)})"
        )


def read_rows(source: str | Path) -> tuple[list[dict[str, Any]], Skipped]:
    """Answered rows (distilled by ``generate``, or chats of your own that end with an assistant turn).

    Rows with exact ids (``output_ids``) come back as they are, others with their turns cleaned. A row without an ``id``
    gets a digest of its content.

    Raises:
        InputError: missing, empty or broken file or row (file:line), an id used twice, or no usable row at all.
    """
    path, skipped, rows, lines = Path(source), Skipped(), [], 0
    places: dict[str, str] = {}
    for number, value in read_jsonl(path):
        lines, where = lines + 1, f"{path}:{number}"
        if not isinstance(value.get("provenance") or {}, dict):
            kind = type(value["provenance"]).__name__
            raise InputError(f"{where}: 'provenance' is {kind}, expected an object; mend it or leave it out")
        if "output_ids" in value:
            _check_exact(value, where)
            row, content = value, digest([value.get(key) for key in ("messages", "prompt_ids", "output_ids")])
        else:
            messages = _usable(value, where, ("assistant",), skipped)
            if not messages:
                continue
            row = {**value, "category": str(value.get("category", "other")), "messages": messages}
            content = digest(messages)
        named = value.get("id") not in (None, "")
        name = str(value["id"]) if named else content
        if name in places and named:
            raise InputError(f"{where}: id {name!r} is also the id of {places[name]}; ids must be unique")
        if name in places:
            skipped["repeated row"] += 1
            continue
        places[name] = where
        rows.append({**row, "id": name})
    if not rows:
        what = f"no answered row in {lines} lines (skipped: {skipped.describe()})" if lines else "the file is empty"
        raise InputError(f"{path}: {what}; run `specheads generate` to let the target write the answers")
    return rows, skipped


def prompt_of(row: dict[str, Any]) -> str:
    """Id of the prompt that a row answers: its ``prompt_id``, or its own id where it names none."""
    return str(row["id"] if row.get("prompt_id") is None else row["prompt_id"])


def digest(messages: Sequence[Any]) -> str:
    """A short stable name of a conversation, or of whatever a row holds instead."""
    return hashlib.sha256(json.dumps(list(messages), sort_keys=True).encode()).hexdigest()[:12]
