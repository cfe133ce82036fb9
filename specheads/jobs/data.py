"""Prompts → the target's answers → rows → features: every step continues what an interrupted one left."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.config.schema import Recipe
from specheads.data.conversations import Prompt, builtin_answers, prompt_of, read_prompts, read_rows
from specheads.data.dataset import FeatureDataset, OnlineFeatureDataset, RowSource
from specheads.data.features import compute_features, estimate_bytes
from specheads.data.generate import DistillReport, distill
from specheads.data.tokenize import Encoded, encode_rows
from specheads.jobs.screen import Screen
from specheads.target.adapter import Target
from specheads.utils import InputError, spread


@dataclass
class Rows:
    """Encoded rows of a recipe. ``report``: what was read, used, cut, skipped and left out, JSON-able."""

    train: list[Encoded]
    heldout: list[Encoded]
    report: dict[str, Any]


def answers_file(recipe: Recipe) -> Path:
    """Where a run keeps what the target wrote."""
    return Path(recipe.output_dir) / "data" / "answers.jsonl"


class _TimeIsUp(Exception):
    """The share of the time for answers is used up; what is written stands."""


def write_answers(
    recipe: Recipe,
    target: Target,
    prompts: Sequence[Prompt],
    path: Path,
    screen: Screen,
    seconds: float | None = None,
) -> DistillReport:
    """Let the target answer ``prompts`` into ``path``, continuing what is there; ``seconds``: stop by then.

    Answers that the recipe's ``data.answers`` holds to the same prompts stand: the new ones are further samples.

    Raises:
        InputError: see ``distill``.
    """
    section = recipe.data
    counted = DistillReport()
    given = distilled_file(recipe)
    elsewhere = read_rows(given)[0] if given is not None and given.resolve() != path.resolve() else []
    answered = Counter(map(prompt_of, elsewhere))
    start = time.perf_counter()
    with screen.stage("answers") as progress:

        def tell(done: int, total: int, tokens: int) -> None:
            progress(done, total, tokens=tokens, answers=f"{done}/{total}")
            counted.rows, counted.tokens, counted.seconds = done, tokens, time.perf_counter() - start
            if seconds is not None and counted.seconds > seconds:
                raise _TimeIsUp

        try:
            report = distill(
                target,
                prompts,
                path,
                max_new_tokens=section.max_new_tokens,
                batch_size=section.batch_size,
                temperatures=section.temperatures,
                answers_per_prompt=section.samples_per_prompt,
                answered=answered,
                max_prompt_tokens=section.max_prompt_tokens,
                seed=recipe.seed,
                revision=recipe.target.revision,
                progress=tell,
            )
        except _TimeIsUp:
            screen.line(f"  {counted.rows} of {len(prompts)} prompts answered in the time for it ({path})")
            return counted
    instead = f" ({report.replaced} in place of rows with another prompt or other settings)" if report.replaced else ""
    screen.line(
        f"  {report.rows} answers written{instead}, {report.reused} were there; "
        f"skipped: {report.skipped.describe()}  ({path})"
    )
    return report


def chosen_prompts(recipe: Recipe) -> tuple[list[Prompt], dict[str, int]]:
    """``data.live_rows`` prompts of the prompt file (all if that is none), and what the file lost.

    Raises:
        InputError: see ``read_prompts``.
    """
    prompts, skipped = read_prompts(recipe.data.prompts)
    wanted = recipe.data.live_rows
    return spread(prompts, wanted), dict(skipped)


def live_prompts(recipe: Recipe) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts that the target answers in this run, and what the prompt file lost.

    Raises:
        InputError: see ``read_prompts``.
    """
    wanted = recipe.data.live_rows
    if wanted == 0 or (wanted is None and recipe.data.answers is not None):
        return [], {}
    return chosen_prompts(recipe)


def distilled_file(recipe: Recipe) -> Path | None:
    """The file of answers that the recipe names, None where the target writes them all.

    Raises:
        InputError: ``builtin`` for a target that no answers ship for.
    """
    name = recipe.data.answers
    if name is None:
        return None
    if name != "builtin":
        return Path(name)
    path = builtin_answers(recipe.target.name)
    if path is None:
        raise InputError(
            f"data.answers: got builtin, but no answers ship for the target {recipe.target.name}; set "
            "data.answers=null data.live_rows=null (it answers all prompts), or give a file"
        )
    return path


def gather_rows(recipe: Recipe, target: Target, screen: Screen) -> Rows:
    """Answers (read and written now) as encoded rows, split by prompt; the split and the limit depend on ids alone.

    Raises:
        InputError: no usable row, rows that another target wrote, or too few prompts to hold any out.
    """
    found: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {}
    path = distilled_file(recipe)
    if path is not None:
        rows, skipped = read_rows(path)
        check_writer(rows, target, str(path))
        if path.resolve() == answers_file(recipe).resolve():  # a quickstart's own: those to earlier prompts stay out
            asked = {prompt.id for prompt in read_prompts(recipe.data.prompts)[0]}
            rows = [row for row in rows if prompt_of(row) in asked]
        found.update((row["id"], row) for row in rows)
        report["read"] = {"file": path.name, "rows": len(rows), "skipped": dict(skipped)}
    prompts, skipped_prompts = live_prompts(recipe)
    if prompts:
        written = write_answers(recipe, target, prompts, answers_file(recipe), screen)
        rows, _ = read_rows(answers_file(recipe))
        found.update((row["id"], row) for row in rows if row["id"] in written.ids)  # others are of earlier settings
        lost = dict(written.skipped)
        report["written"] = {
            "rows": written.rows + written.reused,
            "replaced": written.replaced,
            "skipped": {**skipped_prompts, **lost},
        }
    return encode(recipe, target, found, report, screen)


def encode(
    recipe: Recipe, target: Target, found: dict[str, dict[str, Any]], report: dict[str, Any], screen: Screen
) -> Rows:
    """Answered rows by id as token rows, held out and limited.

    Raises:
        InputError: as ``gather_rows``.
    """
    length = row_length(recipe, target)
    encoded = encode_rows(
        found.values(),
        target.tokenizer,
        length,
        eos_ids=target.config.eos_ids,
        vocab_size=target.config.vocab_size,
    )
    train, heldout = hold_out(encoded.rows, recipe.data.heldout_rows)
    if len(heldout) < recipe.data.heldout_rows:
        screen.line(
            f"  only {len(heldout)} rows held out, not {recipe.data.heldout_rows}: there are {len(encoded.rows)} rows, "
            "and at most half of the prompts are held out; answer more prompts (data.live_rows, data.answers)"
        )
    train, left_out = limit(train, recipe.data.max_tokens)
    report |= {
        "rows": len(train),
        "heldout_rows": len(heldout),
        "tokens": sum(len(row.input_ids) for row in train),
        "supervised": sum(sum(row.loss_mask) for row in train),
        "cut_to_max_length": encoded.cut,
        "skipped": dict(encoded.skipped),
        "left_out_by_max_tokens": left_out,
    }
    screen.line(
        f"rows: {len(train)} to train on ({report['tokens']:,} tokens, {report['supervised']:,} supervised), "
        f"{len(heldout)} held out; {encoded.cut} cut to {length} tokens; "
        f"{left_out} left out by max_tokens; skipped: {encoded.skipped.describe()}"
    )
    return Rows(train, heldout, report)


def row_length(recipe: Recipe, target: Target) -> int:
    """Tokens of the longest row: ``data.max_length``, and never more than the target's context."""
    return min(recipe.data.max_length, target.config.context_limit)


def check_writer(rows: Sequence[dict[str, Any]], target: Target, source: str) -> None:
    """Rows that say who wrote them must have been written by this target: a head learns one target's words.

    Raises:
        InputError: they name another.
    """
    for row in rows:
        writer = row.get("provenance") or {}
        if writer.get("fingerprint") not in (None, target.config.fingerprint):
            raise InputError(
                f"{source}: row {row.get('id')!r} was written by {writer.get('model')} ({writer['fingerprint']}), this "
                f"target is {target.config.name} ({target.config.fingerprint}); set data.answers=null "
                "data.live_rows=null to have it answer"
            )


def _order(prompt_id: str) -> str:
    return hashlib.sha256(prompt_id.encode()).hexdigest()


def hold_out(rows: Sequence[Encoded], count: int) -> tuple[list[Encoded], list[Encoded]]:
    """(training, held-out) rows: at least ``count`` rows held out, all rows of a prompt together, at most half of all.

    Raises:
        InputError: fewer than two prompts.
    """
    groups: dict[str, list[Encoded]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row)
    if len(groups) < 2:
        raise InputError(f"data: {len(groups)} prompt(s) with a usable answer, expected 2 or more to hold one out")
    train: list[Encoded] = []
    heldout: list[Encoded] = []
    for place, name in enumerate(sorted(groups, key=_order)):
        into_heldout = len(heldout) < count and 2 * (place + 1) <= len(groups)
        (heldout if into_heldout else train).extend(groups[name])
    return train, heldout


def limit(rows: Sequence[Encoded], max_tokens: int | None) -> tuple[list[Encoded], int]:
    """Rows in an order mixed over all categories, as many as fit ``max_tokens`` (one at least), and how many do not."""
    order = sorted(rows, key=lambda row: _order(row.id))
    if max_tokens is None:
        return order, 0
    kept: list[Encoded] = []
    tokens = 0
    for row in order:
        tokens += len(row.input_ids)
        if kept and tokens > max_tokens:
            break
        kept.append(row)
    return kept, len(order) - len(kept)


def features(
    recipe: Recipe, target: Target, rows: Rows, layer_ids: Sequence[int], screen: Screen
) -> tuple[RowSource, RowSource]:
    """(training, held-out) rows with features: from the cache in the output folder, or computed for every batch.

    Raises:
        InputError: see ``compute_features``.
    """
    if recipe.data.features == "online":
        return (
            OnlineFeatureDataset(target, rows.train, layer_ids),
            OnlineFeatureDataset(target, rows.heldout, layer_ids),
        )
    sources = []
    for name, part in (("features", rows.train), ("features, held out", rows.heldout)):
        size = estimate_bytes(target, part, layer_ids)
        with screen.stage(f"{name} ({size / 1e6:,.0f} MB)") as progress:
            cache = compute_features(
                target,
                part,
                layer_ids,
                Path(recipe.output_dir) / "features",
                max_length=row_length(recipe, target),
                tokens_per_batch=recipe.data.tokens_per_batch,
                progress=lambda done, total, show=progress: show(done, total, tokens=done),  # type: ignore[misc]
            )
        sources.append(FeatureDataset(cache))
    return sources[0], sources[1]
