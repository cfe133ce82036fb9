"""Every recipe of the tree loads, says nothing that is not a key, and runs end to end at tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specheads import cli
from specheads.build import load_checkpoint
from specheads.config.load import load_recipe
from specheads.jobs.screen import NoScreen
from specheads.jobs.train import train
from tests.fakes import byte_tokenizer, save_tiny_folder

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))


def ids(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def rows(count: int, prefix: str) -> str:
    lines = [
        {
            "id": f"{prefix}{i}",
            "category": ("code", "chat")[i % 2],
            "messages": [{"role": "user", "content": f"say {i}"}],
        }
        for i in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that make any recipe tiny: a random target of four layers, a dozen prompts, two steps."""
    folder = tmp_path_factory.mktemp("small")
    target = save_tiny_folder(folder / "target", "llama", tokenizer=byte_tokenizer, vocab_size=259, num_hidden_layers=4)
    (folder / "prompts.jsonl").write_text(rows(12, "p"))
    (folder / "suite.jsonl").write_text(rows(2, "s"))
    return [
        f"target.name={target}",
        "target.dtype=fp32",
        f"data.prompts={folder / 'prompts.jsonl'}",
        "data.answers=null",
        "data.live_rows=null",
        "data.samples_per_prompt=1",
        "data.max_new_tokens=12",
        "data.heldout_rows=2",
        "head.draft_vocab_size=64",
        "training.minutes=null",
        "training.max_steps=2",
        "training.eval_every=1",
        f"evaluation.suite={folder / 'suite.jsonl'}",
        "evaluation.max_new_tokens=8",
        "evaluation.repeats=1",
    ]


def fitted(path: Path, small: list[str], out: Path) -> list[str]:
    """The overrides for one recipe; feature layers of a deep target do not exist in a shallow one."""
    more = ["head.layer_ids=[1, 3, 4]"] if load_recipe(path).head.type == "eagle3" else []
    return [*small, *more, f"output_dir={out}"]


def test_there_are_recipes_for_both_heads() -> None:
    assert {load_recipe(path).head.type for path in RECIPES} == {"eagle3", "medusa"}


@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_a_recipe_loads_and_is_one_page(path: Path) -> None:
    recipe = load_recipe(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert 40 <= len(lines) <= 70
    said: dict[str, Any] = yaml.safe_load("\n".join(lines))
    resolved = recipe.resolved()
    for section, values in said.items():
        if isinstance(values, dict):
            assert {key: resolved[section][key] for key in values} == values
    assert recipe.output_dir == f"runs/{path.parent.name}/{path.stem}"
    assert recipe.export.formats


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_a_recipe_runs_end_to_end(path: Path, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = load_recipe(path, fitted(path, small, out))
    summary = train(recipe, NoScreen())
    assert summary["steps"] == 2
    assert summary["data"]["rows"] == 10
    assert sorted(summary["exports"]) == sorted(recipe.export.formats)
    run = json.loads((out / "run.json").read_text())
    assert run["recipe"] == recipe.resolved()
    assert run["dtype"] == "fp32"
    for folder in (out, out / "checkpoint", *(out / "export" / name for name in recipe.export.formats)):
        assert load_checkpoint(folder).head.name == recipe.head.type
    report_file = tmp_path / "report.json"
    result = CliRunner().invoke(
        cli.app, ["evaluate", str(out), "--json", str(report_file), "--out", str(tmp_path / "report")]
    )
    assert result.exit_code == 0, result.output
    overall = json.loads(report_file.read_text())["overall"]
    assert overall["identical"] == 1.0
    assert (tmp_path / "report" / "report.md").exists()


def test_generate_decode_chat_and_export_on_a_checkpoint(small: list[str], tmp_path: Path) -> None:
    path = ROOT / "recipes" / "smollm2-135m" / "eagle3.yaml"
    overrides = fitted(path, small, tmp_path / "run")
    run = CliRunner().invoke
    answers = tmp_path / "answers.jsonl"
    result = run(cli.app, ["generate", str(path), *overrides, "--output", str(answers), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == 12
    assert len(answers.read_text().splitlines()) == 12
    result = run(cli.app, ["generate", str(path), *overrides, "--output", str(answers), "--json"])
    assert json.loads(result.stdout)["reused"] == 12

    result = run(cli.app, ["inspect", str(answers), "--row", "p3", overrides[0], "--json"])
    assert result.exit_code == 0, result.output
    pieces = json.loads(result.stdout)["row"]["pieces"]
    assert [piece["supervised"] for piece in pieces] == [False, True]
    result = run(cli.app, ["inspect", str(path), *overrides, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["head_parameters"] > 0

    result = run(cli.app, ["train", str(path), *overrides, "--json"])
    assert result.exit_code == 0, result.output
    checkpoint = json.loads(result.stdout)["checkpoint"]
    few = ["decoding.max_new_tokens=6", "decoding.drafter=head"]
    result = run(cli.app, ["decode", checkpoint, "hello", *few, "--compare", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert 1 <= len(answer["tokens"]) <= 6
    assert all(row["same_tokens"] for row in answer["compared"])

    result = run(cli.app, ["chat", checkpoint, *few], input="hello\nagain\n/new\nonce more\n/quit\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tokens/s") == 3
    result = run(cli.app, ["export", checkpoint, "--format", "native", "--out", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    assert "model.safetensors" in json.loads(result.stdout)["files"]
    result = run(cli.app, ["inspect", str(tmp_path / "out"), "--json"])
    assert json.loads(result.stdout)["head"] == "eagle3"

    other = save_tiny_folder(
        tmp_path / "other", "llama", 5, tokenizer=byte_tokenizer, vocab_size=259, num_hidden_layers=4
    )
    result = run(cli.app, ["decode", checkpoint, "hello", f"target.name={other}"])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "made for" in result.stderr
