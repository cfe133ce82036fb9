"""Look before you spend: what a recipe would do, what a checkpoint is, what is supervised in a row of data."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads import build
from specheads.checkpoints import load_draft, read_files
from specheads.config.load import load_recipe, recipe_of
from specheads.config.schema import Recipe
from specheads.data.conversations import read_jsonl, read_prompts, read_rows
from specheads.data.features import stored_layers
from specheads.data.tokenize import Encoded, encode_rows, supervised_view
from specheads.evaluation.throughput import forward_rate
from specheads.heads.base import Head
from specheads.jobs.data import check_writer, distilled_file, live_prompts, row_length
from specheads.jobs.screen import NoScreen, Screen
from specheads.jobs.train import train
from specheads.target.adapter import Target
from specheads.utils import InputError

TINY = {  # a dry run: everything is done, nothing takes long
    "data.live_rows": "4",
    "data.max_new_tokens": "8",
    "data.heldout_rows": "1",
    "data.max_tokens": "600",
    "training.minutes": "null",
    "training.epochs": "null",
    "training.max_steps": "2",
    "training.trackers": "[]",
}


def inspect(what: str, overrides: Sequence[str], *, row: str | None, dry_run: bool, screen: Screen) -> dict[str, Any]:
    """Look at a recipe (``.yaml``), at data (``.jsonl``, ``.jsonl.gz``), or at a checkpoint; JSON-able facts.

    Raises:
        InputError: ``what`` is none of these, or is broken.
    """
    name = what.lower()
    if name.endswith((".yaml", ".yml")):
        recipe = load_recipe(what, overrides)
        return dry(recipe, screen) if dry_run else inspect_recipe(recipe, screen)
    if dry_run:
        raise InputError(f"inspect --dry-run: got {what}, expected a recipe (.yaml); give one of those in recipes/")
    if name.endswith((".jsonl", ".jsonl.gz")):
        return inspect_data(Path(what), row, overrides, screen)
    return inspect_checkpoint(what, overrides, screen)


def show(facts: dict[str, Any], screen: Screen, title: str) -> dict[str, Any]:
    """A dictionary as a two-column table."""
    screen.table(["", ""], [(key.replace("_", " "), _text(value)) for key, value in facts.items()], title)
    return facts


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def inspect_recipe(recipe: Recipe, screen: Screen) -> dict[str, Any]:
    """Sizes, memory, disk and time that a recipe would need on this machine; nothing is written.

    Raises:
        InputError: the target, the prompts or the answers cannot be read.
    """
    prompts, _ = live_prompts(recipe)
    path = distilled_file(recipe)
    rows = read_rows(path)[0] if path is not None else []
    with screen.stage("target"):
        target = build.build_target(recipe.target)
    encoded: list[Encoded] = []
    check_writer(rows, target, str(path))
    if rows:
        encoded = encode_rows(
            rows,
            target.tokenizer,
            row_length(recipe, target),
            eos_ids=target.config.eos_ids,
            vocab_size=target.config.vocab_size,
        ).rows
    answers = len(prompts) * recipe.data.samples_per_prompt
    tokens = sum(len(row.input_ids) for row in encoded)
    tokens += answers * min(recipe.data.max_new_tokens + 64, row_length(recipe, target))
    tokens = min(tokens, recipe.data.max_tokens or tokens)
    head = build.build_head(recipe, target, encoded or [Encoded("none", "none", "none", [0], [True])])
    return show(_needs(recipe, target, head, answers, tokens), screen, f"recipe for {recipe.target.name}")


def _needs(recipe: Recipe, target: Target, head: Head, answers: int, tokens: int) -> dict[str, Any]:
    """What the pieces cost here. Training keeps fp32 weights, gradients and two moments (AdamW) or one (Muon)."""
    config = target.config
    trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    width = len(stored_layers(target, head.feature_spec.layer_ids)) * config.hidden_size
    rate = forward_rate(target)
    budget = recipe.training
    return {
        "target": target.describe(),
        "target_layers": config.num_layers,
        "target_hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "head": recipe.head.type,
        "head_parameters": trained,
        "feature_layers": list(head.feature_spec.layer_ids),
        "answers_to_write": answers,
        "training_tokens_about": tokens,
        "features_on_disk_mb": 0.0
        if recipe.data.features == "online"
        else tokens * width * target.dtype.itemsize / 1e6,
        "training_memory_mb": trained * 16 / 1e6,
        "checkpoint_mb": trained * 4 / 1e6,
        "target_tokens_per_s": rate,
        "features_minutes_about": tokens / rate / 60,
        "training_budget": {
            key: value
            for key, value in (("minutes", budget.minutes), ("max_steps", budget.max_steps), ("epochs", budget.epochs))
            if value is not None
        },
        "output": recipe.output_dir,
    }


def dry(recipe: Recipe, screen: Screen) -> dict[str, Any]:
    """The whole pipeline at small size in a temporary folder: answer, features, two steps, export, reload, decode.

    Raises:
        InputError: whatever would stop the real run.
    """
    from specheads.jobs.talk import Talker

    with tempfile.TemporaryDirectory(prefix="specheads-dry-run-") as folder:
        small = recipe_of(
            recipe.resolved(), [*(f"{key}={value}" for key, value in TINY.items()), f"output_dir={folder}"]
        )
        summary = train(small, screen)
        loaded = build.load_checkpoint(folder, ["decoding.max_new_tokens=16"])
        answer = Talker(loaded).answer([{"role": "user", "content": "Hello"}], show=False, screen=NoScreen())
    screen.line(f"dry run: trained, exported, read back and decoded ({len(answer.tokens)} tokens); this recipe works")
    return {"steps": summary["steps"], "exports": sorted(summary["exports"]), "decoded_tokens": len(answer.tokens)}


def inspect_checkpoint(source: str, overrides: Sequence[str], screen: Screen) -> dict[str, Any]:
    """Facts of a checkpoint in any dialect. ``overrides``: ``target.name=`` where they depend on the target.

    Raises:
        InputError: no checkpoint there, a damaged one, or one that does not tell enough of its target.
    """
    folder = build.checkpoint_folder(source)
    config, tensors, module, _ = read_files(folder)
    target = build.build_target(build.recipe_beside(folder, overrides).target).config if overrides else None
    head = load_draft(folder, target)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    run = build.provenance(folder)
    facts = {
        "folder": str(folder),
        "format": module.NAME,
        "head": head.name,
        "target": config.get("target") or build.recorded_target(config) or "not recorded",
        "feature_layers": list(head.feature_spec.layer_ids),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "files_mb": {path.name: path.stat().st_size / 1e6 for path in files},
        "tensors": {name: "x".join(map(str, tensor.shape)) for name, tensor in tensors.items()},
        "command": " ".join(run.get("command", [])) or "not recorded",
        "git": run.get("git") or "not recorded",
    }
    return show(facts, screen, "checkpoint")


def inspect_data(path: Path, row: str | None, overrides: Sequence[str], screen: Screen) -> dict[str, Any]:
    """Counts of a file of answered rows, and one row with what is supervised in it. ``row``: its number or its id.

    Raises:
        InputError: broken file, no such row.
    """
    recipe = recipe_of({"head": {"type": "eagle3"}, "training": {"epochs": 1}}, overrides)
    try:
        rows, skipped = read_rows(path)
    except InputError:
        if _holds_answers(path):
            raise
        prompts, skipped = read_prompts(path)
        facts = {"prompts": len(prompts), "skipped": dict(skipped)}
        return show(facts, screen, f"{path}: prompts, not answered yet")
    with screen.stage("tokenizer"):
        target = build.build_target(recipe.target)
    report = encode_rows(
        rows,
        target.tokenizer,
        row_length(recipe, target),
        eos_ids=target.config.eos_ids,
        vocab_size=target.config.vocab_size,
    )
    lengths = [len(one.input_ids) for one in report.rows]
    facts = {
        "rows": len(report.rows),
        "categories": dict(Counter(one.category for one in report.rows)),
        "tokens": report.tokens,
        "supervised": report.supervised,
        "median_length": statistics.median(lengths),
        "longest": max(lengths),
        "cut_to_max_length": report.cut,
        "skipped": {**skipped, **report.skipped},
    }
    show(facts, screen, str(path))
    chosen = _chosen(report.rows, row or "0", path)
    pieces = supervised_view(chosen, target.tokenizer)
    screen.line(f"row {chosen.id} ({len(chosen.input_ids)} tokens, {sum(chosen.loss_mask)} supervised, marked with >):")
    for wanted, text in pieces:
        for line in text.split("\n"):
            screen.line(f"{'>' if wanted else ' '} {line}")
    return {
        **facts,
        "row": {"id": chosen.id, "pieces": [{"supervised": wanted, "text": text} for wanted, text in pieces]},
    }


def _holds_answers(path: Path) -> bool:
    """Whether any row has an answer, exact or as a turn: then the file is no file of prompts, whatever is wrong."""
    for _, value in read_jsonl(path):
        turns = value.get("messages")
        roles = [turn.get("role") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        if "output_ids" in value or "assistant" in roles:
            return True
    return False


def _chosen(rows: Sequence[Encoded], wanted: str, path: Path) -> Encoded:
    found = [one for one in rows if one.id == wanted]
    if found:
        return found[0]
    if wanted.isdigit() and int(wanted) < len(rows):
        return rows[int(wanted)]
    raise InputError(f"{path}: no row {wanted!r}; expected a number below {len(rows)} or an id such as {rows[0].id!r}")
