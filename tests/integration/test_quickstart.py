"""The quickstart at tiny size: everything it promises is there, and a second run does nothing twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specheads import build, cli, hardware
from specheads.config.schema import Recipe
from specheads.hardware import DtypeChoice
from specheads.jobs import quickstart
from specheads.jobs.screen import NoScreen, Progress
from specheads.utils import InputError
from tests.fakes import byte_tokenizer, save_tiny_folder

STAGES = ["pace", "length", "answers", "train", "evaluate", "export", "fp32"]


class Lines(NoScreen):
    """Keeps the lines; stops a stage like Ctrl-C does once it has come so far."""

    def __init__(self, stop: str | None = None) -> None:
        self.lines: list[str] = []
        self.stop = stop

    def line(self, text: str = "") -> None:
        self.lines.append(text)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        def progress(done: float, total: float | None = None, **fields: object) -> None:
            if name == self.stop and total and done >= 0.5 * total:
                raise KeyboardInterrupt

        yield progress


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    for name, prefix, count in (("prompts", "p", 12), ("suite", "s", 3)):
        rows = [{"id": f"{prefix}{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return save_tiny_folder(folder / "target", tokenizer=byte_tokenizer, vocab_size=259, num_hidden_layers=4)


def overrides(target: Path) -> tuple[str, ...]:
    return (
        f"data.prompts={target.parent / 'prompts.jsonl'}",
        f"evaluation.suite={target.parent / 'suite.jsonl'}",
        "data.live_rows=8",
        "data.max_new_tokens=12",
        "data.heldout_rows=2",
        "head.draft_vocab_size=64",
        "target.dtype=fp32",
        "training.minutes=null",
        "training.max_steps=4",
        "training.log_every=1",
        "training.save_every=1",
        "evaluation.max_new_tokens=16",
    )


def recipe(target: Path, out: Path, head: str = "eagle3", *more: str) -> Recipe:
    return quickstart.recipe_for(head, 1.0, str(target), str(out), (*overrides(target), *more))


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_everything_is_made_once(target: Path, tmp_path: Path, head: str) -> None:
    plan = recipe(target, tmp_path, head, "data.heldout_rows=4", "data.max_new_tokens=40")  # enough to measure paths
    first = quickstart.run(plan, NoScreen())
    assert first["stages"] == {"ran": STAGES, "reused": []}
    assert first["overall"]["identical"] == 1.0
    assert set(first["fp32"]["identical"].values()) == {1.0}
    assert set(first["by_drafter"]) == {"head", "lookup", "joined"}
    for name in ("report.md", "report.json", "acceptance_by_depth.png", "tokens_per_s.png", "run.json"):
        assert (tmp_path / name).stat().st_size > 0
    assert json.loads((tmp_path / "report.json").read_text())["training"]["steps"] == 4
    assert build.load_checkpoint(tmp_path / "export" / head, [f"target.name={target}"]).head.name == head
    if head == "medusa":  # more paths than one tree takes, so that decoding may ask for more nodes
        paths = json.loads((tmp_path / "checkpoint" / "config.json").read_text())["head_config"]["tree_paths"]
        assert 16 <= len(paths) <= 63
    card = (tmp_path / "export" / head / "README.md").read_text()
    taus = [f"{first['by_drafter'][name]['tau']:.4g}" for name in ("head", "joined")]
    assert f"| tau | {taus[0]} | {taus[1]} |" in card
    # the drafter that measured fastest is what the checkpoint uses from now on
    fastest = max(first["by_drafter"], key=lambda name: first["by_drafter"][name]["tokens_per_s"])
    assert build.load_checkpoint(tmp_path).recipe.decoding.drafter == fastest

    screen = Lines()
    second = quickstart.run(plan, screen)
    assert second["stages"] == {"ran": [], "reused": STAGES}
    assert second["overall"] == first["overall"]
    assert sum("done, reused (same target" in line for line in screen.lines) == len(STAGES)
    commands = [line.split() for line in screen.lines if line.startswith("  specheads ")]
    assert [words[1] for words in commands] == ["chat", "quickstart", "export"]
    out = tmp_path / "export" / head
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert CliRunner().invoke(cli.app, commands[-1][1:]).exit_code == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before  # the numbers of the card among them


def test_what_changed_runs_again_and_nothing_before_it(target: Path, tmp_path: Path) -> None:
    quickstart.run(recipe(target, tmp_path), NoScreen())
    longer = quickstart.run(recipe(target, tmp_path, "eagle3", "training.max_steps=6"), NoScreen())
    assert longer["training"]["steps"] == 6
    assert longer["stages"]["reused"] == ["pace", "length", "answers"]
    screen = Lines()
    measured = quickstart.run(
        recipe(target, tmp_path, "eagle3", "training.max_steps=6", "evaluation.repeats=1"), screen
    )
    assert measured["stages"]["ran"] == ["length", "evaluate", "export", "fp32"]  # the head is not trained again
    same = ("training.max_steps=6", "evaluation.repeats=1", "export.dtype=fp32")
    assert quickstart.run(recipe(target, tmp_path, "eagle3", *same), NoScreen())["stages"]["ran"] == ["export"]
    assert json.loads((tmp_path / "export" / "eagle3" / "config.json").read_text())["torch_dtype"] == "float32"
    line = next(line for line in screen.lines if "a forward reads" in line)
    assert "tokens of text; measured answers of at most 16 tokens" in line
    fresh = quickstart.run(recipe(target, tmp_path), NoScreen(), fresh=True)
    assert fresh["stages"]["ran"] == STAGES


def test_auto_is_what_it_was_when_the_run_began(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = recipe(target, tmp_path, "medusa", "target.dtype=auto")
    monkeypatch.setattr(hardware, "_auto", {"cpu": DtypeChoice(torch.bfloat16, "a quiet minute")})
    with pytest.raises(KeyboardInterrupt):
        quickstart.run(plan, Lines(stop="training"))
    monkeypatch.setattr(hardware, "_auto", {"cpu": DtypeChoice(torch.float32, "a noisy minute")})
    report = quickstart.run(plan, NoScreen())
    assert report["stages"]["reused"] == ["pace", "length", "answers"]  # which depend on the target's dtype
    assert report["dtype"] == "bf16"
    monkeypatch.setattr(hardware, "_auto", {"cpu": DtypeChoice(torch.float32, "a noisy minute")})
    assert quickstart.run(plan, NoScreen(), fresh=True)["dtype"] == "fp32"  # a new run measures


def test_no_live_rows_beside_a_file_of_answers(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is there to train on"):
        quickstart.run(recipe(target, tmp_path / "none", "eagle3", "data.live_rows=0"), NoScreen())
    file = tmp_path / "answers.jsonl"
    turns = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} it is"}] for i in range(6)
    ]
    file.write_text("".join(json.dumps({"id": str(i), "messages": one}) + "\n" for i, one in enumerate(turns)))
    plan = recipe(target, tmp_path / "run", "eagle3", "data.live_rows=0", f"data.answers={file}")
    assert quickstart.run(plan, NoScreen())["training"]["steps"] == 4
    assert quickstart.run(plan, NoScreen())["stages"]["reused"] == STAGES


@pytest.mark.parametrize("stage", ["answers", "training"])
def test_an_interrupted_run_is_continued(target: Path, tmp_path: Path, stage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        quickstart.run(recipe(target, tmp_path / "stopped"), Lines(stop=stage))
    kept = {path: path.read_bytes() for path in (tmp_path / "stopped").rglob("answers.jsonl")}
    assert kept
    screen = Lines()
    continued = quickstart.run(recipe(target, tmp_path / "stopped"), screen)
    assert continued["training"]["steps"] == 4
    for path, content in kept.items():
        assert path.read_bytes().startswith(content)  # nothing that was written is lost or written again
    whole = quickstart.run(recipe(target, tmp_path / "whole"), NoScreen())
    names = [tmp_path / folder / "checkpoint" / "model.safetensors" for folder in ("stopped", "whole")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert whole["overall"]["tau"] == continued["overall"]["tau"]


def test_another_target_answers_everything_itself_in_its_share_of_the_time(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "ANSWER_SECONDS", 0.0)  # up after the first answer of each batch
    screen = Lines()
    plan = recipe(target, tmp_path, "eagle3", "data.live_rows=null", "data.batch_size=4", "data.heldout_rows=1")
    with pytest.raises(InputError, match="expected 2 or more"):  # one answer cannot be split
        quickstart.run(plan, screen)
    assert any("1 of 12 prompts answered in the time for it" in line for line in screen.lines)
    monkeypatch.setattr(quickstart, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(quickstart, "FEATURE_SECONDS", 60.0)
    report = quickstart.run(plan, NoScreen(), fresh=True)
    assert report["training"]["data"]["rows"] == 11


def test_the_command_prints_a_table_and_json(target: Path, tmp_path: Path) -> None:
    sets = [word for override in overrides(target) for word in ("--set", override)]
    command = ["quickstart", "--target", str(target), "--output", str(tmp_path), *sets]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    for words in ("speed-up", "joined", "same", "In fp32, 100% of", "Next:"):
        assert words in result.stdout
    result = CliRunner().invoke(cli.app, [*command, "--json"])
    assert json.loads(result.stdout)["stages"]["reused"] == STAGES
