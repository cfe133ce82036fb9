"""Self-distillation: the target answers the prompts, and every answer is a line of a file at once.

A distilled row::

    {"id": "qa-17#1", "prompt_id": "qa-17", "category": "qa",
     "messages": [..., {"role": "assistant", "content": "Because ..."}],
     "prompt_ids": [...], "output_ids": [...], "finish": "stop", "temperature": 0.8,
     "provenance": {"model", "fingerprint", "template", "temperature", "top_p", "max_new_tokens", "seed", "date"}}

and ``revision`` in the provenance where the target was loaded by one.

The file is append-only. A run that was killed, at whatever byte, is taken up by running it again: finished rows stand,
a torn last line is dropped, and a row's random numbers come from its own id, so the rest reads as if nothing happened.
A row of the same id whose prompt or settings were others is answered again; it stands until the new one is written.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.data.conversations import Prompt, Skipped
from specheads.data.engines import ENGINES, Answer, Request
from specheads.data.tokenize import SkipRow, prompt_ids, template_hash
from specheads.target.adapter import Target
from specheads.utils import InputError, atomic_path, disk_error

WINDOW = 8  # batches whose prompts are sorted together: neighbours of like length, yet a mixed file at any moment


@dataclass
class DistillReport:
    """What a run wrote. ``rows`` and ``tokens`` count this run; ``reused`` rows stood in the file before; ``replaced``
    of the new rows took the place of one with another prompt or other settings; ``ids``: of every row asked for."""

    rows: int = 0
    tokens: int = 0
    reused: int = 0
    replaced: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    seconds: float = 0.0
    ids: frozenset[str] = frozenset()

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, prefill included; 0 when nothing was written."""
        return self.tokens / self.seconds if self.rows else 0.0


def finished_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a distilled file by id; a torn last line, and a row that a later one replaced, leave the file first.

    Raises:
        InputError: it cannot be read, or a line in the middle is broken or is not a distilled row (file:line).
    """
    if not path.exists():
        return {}
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror}); choose another output file") from error
    lines = raw.split(b"\n")
    rows: dict[str, dict[str, Any]] = {}
    kept: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            if number == len(lines):
                break  # the kill came in the middle of this write
            raise InputError(
                f"{path}:{number}: broken JSON in the middle of the file; expected a row written by `generate`. "
                "Delete that line to have its prompt answered again"
            ) from None
        known = isinstance(row, dict) and {"id", "output_ids"} <= set(row)
        if not known or not isinstance(row.get("provenance"), dict):
            raise InputError(
                f"{path}:{number}: not a row that `generate` wrote (no id, output_ids and provenance); "
                "choose another output file"
            )
        name = str(row["id"])
        rows[name] = row
        kept.pop(name, None)
        kept[name] = line
    whole = b"".join(line + b"\n" for line in kept.values())
    if whole != raw:
        with atomic_path(path) as temporary:
            temporary.write_bytes(whole)
    return rows


def _check_same_source(path: Path, rows: dict[str, dict[str, Any]], target: Target) -> None:
    """All rows must come from this target through this template."""
    expected = {"fingerprint": target.config.fingerprint, "template": template_hash(target.tokenizer)}
    for name, row in rows.items():
        for key, value in expected.items():
            if row["provenance"].get(key) != value:
                raise InputError(
                    f"{path}: row {name!r} was written with {key} {row['provenance'].get(key)!r} "
                    f"({row['provenance'].get('model')}), this run has {value!r} ({target.config.name}); "
                    "choose another output file, or delete this one"
                )


def _settings(request: Request, max_new_tokens: int) -> dict[str, Any]:
    """What, beside target and prompt, decides a row's text."""
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_new_tokens": max_new_tokens,
        "seed": request.seed,
    }


def _answers(row: dict[str, Any], prompt: Prompt, request: Request, max_new_tokens: int) -> bool:
    """Whether a row of the file answers this very prompt under these very settings."""
    if row.get("prompt_ids"):
        same = row["prompt_ids"] == request.prompt_ids
    else:  # shipped sets leave the ids of the prompt out
        turns = row.get("messages")
        same = isinstance(turns, list) and turns[:-1] == list(prompt.messages)
    return same and _settings(request, max_new_tokens).items() <= row["provenance"].items()


def plan(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    answers_per_prompt: int,
    answered: Mapping[str, int],
    max_prompt_tokens: int,
    top_p: float,
    seed: int,
    skipped: Skipped,
) -> dict[str, tuple[Prompt, Request]]:
    """Every answer to be written, by row id. The k-th answer beyond the first has ``#k`` behind the prompt's id."""
    wanted: dict[str, tuple[Prompt, Request]] = {}
    for prompt in prompts:
        place = int(hashlib.sha256(prompt.id.encode()).hexdigest()[:8], 16)  # does not move when lines are added
        try:
            ids = prompt_ids(target.tokenizer, prompt.messages)
        except SkipRow as reason:
            skipped[str(reason)] += 1
            continue
        if len(ids) > max_prompt_tokens:
            skipped[f"prompt longer than {max_prompt_tokens} tokens"] += 1
            continue
        if max(ids) >= target.config.vocab_size:
            raise InputError(
                f"prompt {prompt.id!r}: token id {max(ids)} is beyond the embedding ({target.config.vocab_size} rows); "
                "the tokenizer does not belong to this target"
            )
        first = answered.get(prompt.id, 0)
        for answer in range(first, first + answers_per_prompt):
            name = prompt.id if answer == 0 else f"{prompt.id}#{answer}"
            if name in wanted:
                raise InputError(
                    f"prompts: two answers would be named {name!r} (answer k to a prompt is its id and #k); "
                    "rename that prompt's id"
                )
            temperature = temperature_of(temperatures, place, answer)
            wanted[name] = (prompt, Request(name, ids, temperature, top_p, seed))
    return wanted


def temperature_of(temperatures: Sequence[float], prompt: int, answer: int) -> float:
    """Of the ``answer``-th answer to the ``prompt``-th prompt: taken in turn, so that greedy and sampled rows mix.

    Once all had their turn only sampling goes on: a second greedy answer would be the first one again.
    """
    left = temperatures if answer < len(temperatures) else [value for value in temperatures if value > 0] or [0.0]
    return float(left[(prompt + answer) % len(left)])


def in_order(requests: Sequence[Request], batch_size: int, seed: int) -> list[Request]:
    """Shuffled by id, then sorted by length (long first) within windows of a few batches."""
    shuffled = sorted(requests, key=lambda request: random.Random(f"{seed}/{request.key}").random())
    size = WINDOW * batch_size
    windows = (shuffled[start : start + size] for start in range(0, len(shuffled), size))
    return [request for window in windows for request in sorted(window, key=lambda r: -len(r.prompt_ids))]


def _check_options(
    engine: str, max_new_tokens: int, batch_size: int, answers_per_prompt: int, temperatures: Sequence[float]
) -> None:
    if engine not in ENGINES:
        raise InputError(f"engine: got {engine!r}, expected one of {sorted(ENGINES)}")
    if max_new_tokens < 1 or batch_size < 1 or answers_per_prompt < 1 or not temperatures or min(temperatures) < 0:
        raise InputError(
            f"generation: got max_new_tokens {max_new_tokens}, batch_size {batch_size}, answers_per_prompt "
            f"{answers_per_prompt}, temperatures {tuple(temperatures)}; expected counts of 1 or more and at least one "
            "temperature of 0 or more"
        )
    if answers_per_prompt > len(temperatures) and not any(temperatures):
        raise InputError(
            f"generation: got answers_per_prompt {answers_per_prompt} with temperatures {tuple(temperatures)}, "
            "expected one above 0 among them: greedy answers to one prompt are all the same"
        )


def distill(
    target: Target,
    prompts: Sequence[Prompt],
    out_path: str | Path,
    *,
    engine: str = "batched",
    max_new_tokens: int = 256,
    batch_size: int = 32,
    temperatures: Sequence[float] = (0.0, 0.8),
    top_p: float = 1.0,
    answers_per_prompt: int = 1,
    answered: Mapping[str, int] | None = None,
    max_prompt_tokens: int = 1024,
    seed: int = 0,
    revision: str | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> DistillReport:
    """Let the target answer ``prompts`` into ``out_path``, continuing what is there.

    answered: answers that exist elsewhere, by prompt id; the new ones are numbered after them.
    revision: of the hub, as the target was loaded; recorded in every row.
    progress: called with (rows done, rows in all, new tokens of this run) after every row.

    Raises:
        InputError: unknown engine, bad numbers, a file by another target or template, a full disk.
    """
    _check_options(engine, max_new_tokens, batch_size, answers_per_prompt, temperatures)
    path, report = Path(out_path), DistillReport()
    room = target.config.context_limit - max_new_tokens
    if room < 1:
        raise InputError(
            f"max_new_tokens: got {max_new_tokens}, expected less than the target's context limit of "
            f"{target.config.context_limit} tokens, with room for the prompt; set data.max_new_tokens lower"
        )
    wanted = plan(
        target,
        prompts,
        temperatures=temperatures,
        answers_per_prompt=answers_per_prompt,
        answered=answered or {},
        max_prompt_tokens=min(max_prompt_tokens, room),
        top_p=top_p,
        seed=seed,
        skipped=report.skipped,
    )
    if prompts and not wanted:
        raise InputError(
            f"prompts: none of {len(prompts)} can be answered ({report.skipped.describe()}); give shorter prompts, or "
            "raise data.max_prompt_tokens or lower data.max_new_tokens"
        )
    report.ids = frozenset(wanted)
    found = finished_rows(path)
    _check_same_source(path, found, target)
    done = {name for name, asked in wanted.items() if name in found and _answers(found[name], *asked, max_new_tokens)}
    report.reused = len(done)
    missing = in_order([request for name, (_, request) in wanted.items() if name not in done], batch_size, seed)
    if not missing:
        return report
    writer = ENGINES[engine](target, batch_size=batch_size, max_new_tokens=max_new_tokens)
    start = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            for answer in writer.run(missing):
                prompt, request = wanted[answer.key]
                row = _row(target, prompt, request, answer, max_new_tokens, revision)
                stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                stream.flush()
                report.rows += 1
                report.replaced += answer.key in found
                report.tokens += len(answer.output_ids)
                report.seconds = time.perf_counter() - start
                if progress is not None:
                    progress(report.reused + report.rows, len(wanted), report.tokens)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        if report.replaced:
            finished_rows(path)  # the old lines leave the file, also when this run is stopped halfway
    return report


def _row(
    target: Target, prompt: Prompt, request: Request, answer: Answer, max_new_tokens: int, revision: str | None
) -> dict[str, Any]:
    """The line to write, with where it came from."""
    text = target.tokenizer.decode(answer.output_ids, skip_special_tokens=True)
    return {
        "id": request.key,
        "prompt_id": prompt.id,
        "category": prompt.category,
        "messages": [*prompt.messages, {"role": "assistant", "content": text}],
        "prompt_ids": request.prompt_ids,
        "output_ids": answer.output_ids,
        "finish": answer.finish,
        "temperature": request.temperature,
        "provenance": {
            "model": target.config.name,
            "fingerprint": target.config.fingerprint,
            **({"revision": revision} if revision else {}),
            "template": template_hash(target.tokenizer),
            **_settings(request, max_new_tokens),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        },
    }
