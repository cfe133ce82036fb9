"""From a checkpoint to its target and recipe: published ones, exported ones, and files that only lie nearby."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specheads import build, cli, hardware
from specheads.checkpoints import export
from specheads.config.load import recipe_of
from specheads.config.schema import Recipe
from specheads.hardware import DtypeChoice
from specheads.heads.base import Head
from specheads.jobs.screen import NoScreen
from specheads.jobs.train import tracked, train
from specheads.target.adapter import Target
from specheads.utils import InputError
from tests.fakes import byte_tokenizer, save_tiny_folder

PRIVATE = ("specheads", "provenance", "base_model_name_or_path")  # what other people's checkpoints do not tell
UNTOLD = {"medusa": ("vocab_size", "hidden_size"), "eagle3": ("eagle_aux_hidden_state_layer_ids",)}


class Lines(NoScreen):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "target"
    return save_tiny_folder(path, tokenizer=byte_tokenizer, vocab_size=259, num_hidden_layers=8)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return build.build_target(recipe(folder).target)


def recipe(folder: Path, kind: str = "medusa", **sections: Any) -> Recipe:
    head = {"type": kind, "draft_vocab_size": None}
    base = {"target": {"name": str(folder), "dtype": "fp32"}, "head": head, "training": {"max_steps": 2}}
    return recipe_of({**base, **sections})


def exported(out: Path, target: Target, kind: str, **options: Any) -> tuple[Path, Head]:
    head = build.build_head(recipe(Path(target.config.name), kind), target, [])
    return export(head, target.config, target.parts, kind, out, **options), head


def drop(path: Path, *keys: str) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in keys}))


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.filterwarnings("ignore:EAGLE-3 checkpoint without feature layers")
def test_published_checkpoints_are_served_for_the_target_that_is_named(
    tmp_path: Path, target: Target, kind: str
) -> None:
    out, head = exported(tmp_path / "draft", target, kind)
    drop(out, *PRIVATE, *UNTOLD[kind])
    named = [f"target.name={target.config.name}", "target.dtype=fp32"]
    loaded = build.load_checkpoint(out, named)
    assert loaded.head.name == kind
    assert loaded.head.feature_spec == head.feature_spec
    assert all(torch.equal(loaded.head.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    done = CliRunner().invoke(cli.app, ["inspect", str(out), *named, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["head"] == kind
    untold = CliRunner().invoke(cli.app, ["inspect", str(out)])
    assert (untold.exit_code, "name the target" in untold.stderr) == (2, True)  # nothing there says it


def test_damage_is_told_before_the_target_is_loaded(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = exported(tmp_path / "draft", target, "medusa")
    (out / "medusa_lm_head.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr(build, "build_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(InputError, match="not readable as tensors"):
        build.load_checkpoint(out)


def write_run(path: Path, name: str, fingerprint: str, drafter: str, kind: str = "medusa") -> None:
    made = recipe(Path(name), kind, decoding={"drafter": drafter}).resolved()
    facts = {"recipe": made, "target": {"name": name, "fingerprint": fingerprint}}
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("dropped", [(), ("specheads",)])
def test_a_checkpoint_knows_its_target_better_than_files_around_it(
    tmp_path: Path, target: Target, dropped: tuple[str, ...]
) -> None:
    out, _ = exported(tmp_path / "others" / "sub" / "draft", target, "medusa")
    drop(out, *dropped)
    for place in (tmp_path / "others", tmp_path / "others" / "sub", out):
        write_run(place, "another/target", "else", "lookup")
    assert build.recipe_beside(out, ()).target.name == target.config.name
    assert build.recipe_beside(out, ()).decoding.drafter == "joined"
    assert build.recipe_beside(out, ["target.name=third/target"]).target.name == "third/target"


def test_the_record_of_the_same_run_beside_a_checkpoint_counts(tmp_path: Path, target: Target) -> None:
    run = {"recipe": recipe(Path(target.config.name)).resolved()}
    out, _ = exported(tmp_path / "run" / "checkpoint", target, "medusa", extra={"run": run})
    assert build.recipe_beside(out, ()) == recipe(Path(target.config.name))
    write_run(tmp_path / "run", target.config.name, target.config.fingerprint, "lookup")
    assert build.recipe_beside(out, ()).decoding.drafter == "lookup"
    write_run(tmp_path / "run", target.config.name, target.config.fingerprint, "lookup", kind="eagle3")
    assert build.recipe_beside(out, ()).decoding.drafter == "joined"  # another head's run


def test_the_limits_of_the_recipe_hold_for_the_tree_of_a_medusa_checkpoint(tmp_path: Path, target: Target) -> None:
    paths = ((0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1))  # in order of gain
    head = build.build_head(recipe(Path(target.config.name)), target, [])
    head.config = replace(head.config, tree_paths=paths)
    out = export(head, target.config, target.parts, "native", tmp_path / "draft")

    def nodes(*limits: str) -> tuple[tuple[int, ...], ...]:
        loaded = build.load_checkpoint(out, [f"target.name={target.config.name}", "target.dtype=fp32", *limits])
        drafter: Any = build.build_decoders(loaded, ["head"])["head"].make_drafter()
        return drafter._head.drafter.tree.paths

    assert nodes() == tuple(sorted(paths, key=lambda path: (len(path), path)))
    assert nodes("decoding.tree_nodes=4") == ((0,), (1,), (0, 0))
    assert nodes("decoding.tree_depth=2", "decoding.tree_top_k=2") == ((0,), (1,), (0, 0), (0, 1))


def test_the_trackers_of_a_recipe_are_told_its_sections(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(folder, training={"max_steps": 1, "trackers": ["wandb"]}, output_dir=str(tmp_path / "run"))
    asked: list[Any] = []

    def make(**options: Any) -> Any:
        asked.append(options)
        raise InputError("enough")

    monkeypatch.setattr("specheads.jobs.train.make_accelerator", make)
    with pytest.raises(InputError, match="enough"):
        train(wanted, NoScreen())
    assert asked == [{"cpu": None, "trackers": ("wandb",), "folder": tmp_path / "run"}]
    told = tracked(wanted)
    assert told["training"] == wanted.resolved()["training"]
    assert set(told) == {"target", "head", "data", "training", "evaluation", "decoding", "export"}


def test_auto_is_chosen_once_and_recorded(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 6, "heldout_rows": 1}
    out = tmp_path / "run"
    auto = {"name": str(folder), "dtype": "auto"}
    wanted = recipe(folder, target=auto, data=data, export={"formats": ["medusa"]}, output_dir=str(out))
    for measured in (torch.bfloat16, torch.float32):  # the second run finds the other one faster
        monkeypatch.setattr(hardware, "_auto", {"cpu": DtypeChoice(measured, f"a probe said {measured}")})
        screen = Lines()
        train(wanted, screen)
        run = json.loads((out / "run.json").read_text())
        for name in ("dtype", "training_dtype"):
            assert (run[name], run[f"{name}_reason"]) == ("bf16", "a probe said torch.bfloat16")
        assert "  trained in bf16: a probe said torch.bfloat16" in screen.lines
    assert build.trained_in(out / "checkpoint")["training_dtype"] == "bf16"
    (out / "run.json").unlink()
    assert build.recipe_beside(out / "export" / "medusa", ()) == wanted  # an export says itself how it was made
