"""``accelerate launch`` of a whole recipe: one and two CPU processes share the data and reach the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fakes import byte_tokenizer, save_tiny_folder

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
pytestmark = pytest.mark.slow


def launch(config: str, recipe: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "configs/accelerate" / config),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "specheads", "train", str(recipe), *overrides],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    target = save_tiny_folder(folder / "target", tokenizer=byte_tokenizer, vocab_size=259, num_hidden_layers=4)
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(14)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "target": {"name": str(target), "dtype": "fp32"},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 12, "heldout_rows": 2},
        "head": {"type": "eagle3", "layer_ids": [1, 3, 4], "draft_vocab_size": 64, "ttt_steps": 2},
        "training": {"max_steps": 4, "rows_per_batch": 2, "log_every": 1, "eval_every": 2, "dtype": "fp32"},
        "export": {"formats": ["eagle3"]},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_one_and_two_processes_reach_the_same_losses(recipe: Path, tmp_path: Path) -> None:
    found = {}
    for config in ("cpu-1.yaml", "cpu-2.yaml"):
        out = tmp_path / config
        done = launch(config, recipe, f"output_dir={out}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("checkpoint: ") == 1  # the main process alone speaks
        assert (out / "checkpoint" / "config.json").exists()
        assert (out / "export" / "eagle3" / "config.json").exists()
        assert not list(out.glob(".data-ready-*"))
        found[config] = losses(out)
    one, two = found.values()
    assert len(one) == len(two) == 4
    assert two == pytest.approx(one, abs=1e-4)


def test_a_batch_that_two_processes_cannot_share_is_one_line(recipe: Path, tmp_path: Path) -> None:
    done = launch("cpu-2.yaml", recipe, f"output_dir={tmp_path / 'run'}", "training.rows_per_batch=3")
    assert done.returncode != 0
    assert "rows_per_batch: got 3" in done.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_launch_configuration_is_valid(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 1
