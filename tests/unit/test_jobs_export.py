"""``specheads export``: the dtype of the recipe, the weights as stored, the numbers of these weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from specheads import build, cli
from specheads.checkpoints import save_native
from specheads.config.load import recipe_of
from specheads.jobs.stages import file_digest
from tests.fakes import byte_tokenizer, save_tiny_folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose recipe asks for an export in fp32, over a target that computes in bf16."""
    folder = tmp_path_factory.mktemp("export")
    place = save_tiny_folder(folder / "target", tokenizer=byte_tokenizer, vocab_size=259, num_hidden_layers=4)
    values = {
        "target": {"name": str(place), "dtype": "bf16"},
        "head": {"type": "eagle3", "layer_ids": [1, 3, 4], "draft_vocab_size": None},
        "training": {"max_steps": 1},
        "export": {"dtype": "fp32"},
    }
    recipe = recipe_of(values)
    target = build.build_target(recipe.target)
    head = build.build_head(recipe, target, []).float()
    run = {"run": build.record(recipe, target)}
    save_native(folder / "run" / build.CHECKPOINT, head, target.config, run)
    return folder / "run"


def exported(run_folder: Path, out: Path, *arguments: str) -> Any:
    command = ["export", str(run_folder), "--format", "native", "--out", str(out), *arguments]
    return CliRunner().invoke(cli.app, command)


def test_the_dtype_is_the_recipes_unless_it_is_named(run_folder: Path, tmp_path: Path) -> None:
    for arguments, name in (((), "float32"), (("--dtype", "bf16"), "bfloat16"), (("export.dtype=bf16",), "bfloat16")):
        done = exported(run_folder, tmp_path / "out", *arguments)
        assert done.exit_code == 0, done.output
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name
    refused = exported(run_folder, tmp_path / "out", "--dtype", "fp8")
    assert refused.exit_code == 2
    assert "export.dtype" in refused.stderr


def test_the_card_shows_the_numbers_of_these_weights_and_of_no_others(run_folder: Path, tmp_path: Path) -> None:
    report = {"by_drafter": {"head": {"tau": 1.75}, "lookup": {"tau": 1.25}}}
    weights = file_digest(run_folder / build.CHECKPOINT / "model.safetensors")
    for digest, said in (
        (weights, "| tau | 1.75 |"),
        ("other", "Nothing was measured"),
        (None, "Nothing was measured"),
    ):
        (run_folder / "report.json").write_text(json.dumps({**report, "draft_digest": digest}))
        done = exported(run_folder, tmp_path / "out")
        assert done.exit_code == 0, done.output
        card = (tmp_path / "out" / "README.md").read_text()
        assert said in card
        assert "1.25" not in card
        assert ("no numbers on its card" in done.output) == (digest != weights)


def test_evaluate_leaves_the_report_that_the_card_is_made_of(run_folder: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"id": "a", "turns": ["say 1"]}) + "\n")
    small = ["evaluation.max_new_tokens=4", "evaluation.repeats=1", "evaluation.drafters=[head]", "target.dtype=fp32"]
    command = ["evaluate", str(run_folder), *small, "--suite", str(suite), "--out", str(run_folder)]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert exported(run_folder, tmp_path / "out").exit_code == 0
    assert "|  | head |" in (tmp_path / "out" / "README.md").read_text()


def test_weights_are_exported_as_they_are_stored(run_folder: Path, tmp_path: Path) -> None:
    assert exported(run_folder, tmp_path / "out").exit_code == 0
    stored = load_file(run_folder / build.CHECKPOINT / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[name], written[name]) for name in stored)  # not rounded to the target's bf16


def test_a_checkpoint_is_never_exported_over_itself(run_folder: Path) -> None:
    goal = run_folder / build.CHECKPOINT
    before = (goal / "model.safetensors").read_bytes()
    refused = exported(run_folder, goal)
    assert refused.exit_code == 2
    assert "is the checkpoint that is exported" in refused.stderr
    assert (goal / "model.safetensors").read_bytes() == before
