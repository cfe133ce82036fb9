"""Native checkpoints: byte-equal round trip, and every kind of damage is one clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import TARGET, TinyHead, frozen_parts, train

from specheads import heads
from specheads.checkpoints import FORMATS, export, load_draft, save_native
from specheads.checkpoints.io import resolve_folder, temporary_folder
from specheads.heads.base import Head
from specheads.modules.rotary import Rotary
from specheads.utils import InputError


@pytest.fixture(autouse=True)
def tiny_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads.HEADS, "tiny", TinyHead)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_native(tmp_path / "draft", TinyHead(), TARGET, {"run": "test"})


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def equal(a: Head, b: Head) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_round_trip_and_config(tmp_path: Path) -> None:
    head = TinyHead()
    folder = save_native(tmp_path / "a b é", head, TARGET, {"command": "x"})
    assert equal(head, load_draft(folder, TARGET))
    assert equal(head, load_draft(folder / "config.json"))  # a file of the folder will do
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == "specheads"
    assert config["feature_layers"] == [1, 3]
    assert config["feature_convention"] == "input of layer i; L = raw last state"
    assert (config["dtype"], config["target"]["fingerprint"]) == ("float32", "f00d")
    assert config["provenance"] == {"command": "x"}
    assert not list(tmp_path.glob(".*"))


def test_a_training_checkpoint_is_a_draft(tmp_path: Path) -> None:
    _, result = train(tmp_path, max_steps=2)
    load_draft(result.best, TARGET)


def test_dtypes(tmp_path: Path) -> None:
    head = TinyHead()
    folder = save_native(tmp_path / "low", head, TARGET, dtype=torch.bfloat16)
    low = load_draft(folder)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert torch.equal(low.fc.weight, head.fc.weight.bfloat16())  # type: ignore[union-attr, operator, arg-type]
    assert {p.dtype for p in load_draft(folder, dtype=torch.float32).parameters()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def rename(old: str, new: str) -> Any:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"missing lm_head\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected extra"),
        (rename("fc.weight", "fd.weight"), r"missing fc\.weight; unexpected fd\.weight"),
        (lambda t: t.update({"fc.bias": torch.ones(3)}), r"wrong shape: fc\.bias \(3,\) instead of \(8,\)"),
        (lambda t: t["fc.weight"].fill_(float("nan")), r"fc\.weight holds inf or nan"),
    ],
)
def test_damaged_tensors(saved: Path, change: Any, message: str) -> None:
    edit(saved, change)
    with pytest.raises(InputError, match=message) as caught:
        load_draft(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -20])
def test_truncated_file(saved: Path, keep: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors: not readable as tensors"):
        load_draft(saved)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_version": 2}, "format_version: got 2, expected 1"),
        ({"head": "hydra"}, "head is 'hydra', expected one of"),
        ({"head_config": {"width": 3}}, "head_config does not describe a tiny head"),
        ({"feature_convention": "output of layer i"}, "feature_convention: got 'output of layer i'"),
    ],
)
def test_damaged_config(saved: Path, values: dict[str, Any], message: str) -> None:
    edit_config(saved, **values)
    with pytest.raises(InputError, match=message):
        load_draft(saved)


def test_missing_field(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    del config["feature_layers"]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="feature_layers is missing"):
        load_draft(saved)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_config_that_is_no_json_object(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        load_draft(saved)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (replace(TARGET, hidden_size=16), r"hidden_size 8\), but the target is tiny \(hidden_size 16"),
        (replace(TARGET, vocab_size=17), "vocab_size 16"),
        (replace(TARGET, num_layers=4), "num_layers 3"),
        (replace(TARGET, fingerprint="beef"), "fingerprint f00d"),
    ],
)
def test_wrong_target(saved: Path, target: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_draft(saved, target)


def test_fewer_positions_than_the_target_are_told(saved: Path) -> None:
    with pytest.warns(UserWarning, match=f"made for {TARGET.context_limit} positions, the target takes 4096"):
        load_draft(saved, replace(TARGET, context_limit=4096))


@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])
def test_a_folder_of_something_else_is_never_replaced(saved: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="expected a new or empty folder"):
        save_native(folder, load_draft(saved, TARGET), TARGET)
    assert (folder / name).read_text() == '{"model_type": "llama"}'
    (folder / name).unlink()
    for _ in range(2):  # empty, then a checkpoint of ours
        save_native(folder, load_draft(saved, TARGET), TARGET)
    with pytest.raises(InputError, match="is a file, expected a new or empty folder"):
        save_native(folder / "config.json", load_draft(saved, TARGET), TARGET)


def test_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist, expected a checkpoint folder or a hub id"):
        load_draft(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="has no tensors, expected one of"):
        load_draft(tmp_path)
    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"no draft that is known .* model\.embed_tokens\.weight"):
        load_draft(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="could not be fetched from the hub"):
        resolve_folder("someone/some-draft-that-is-not-cached")


def test_pickled_code_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="not readable as tensors"):
        load_draft(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_unusable_weights_are_not_saved(saved: Path) -> None:
    before = load_file(saved / "model.safetensors")
    head = TinyHead()
    with torch.no_grad():
        head.fc.weight[0, 0] = float("inf")
    with pytest.raises(InputError, match=r"fc\.weight holds inf or nan"):
        save_native(saved, head, TARGET)
    head = TinyHead()
    head.fc.weight = torch.nn.Parameter(torch.empty(0, 16))  # what a sharded run leaves
    with pytest.raises(InputError, match=r"fc\.weight has no values"):
        save_native(saved, head, TARGET)
    with pytest.raises(InputError, match="has no values"):
        save_native(saved, TinyHead().to("meta"), TARGET)
    assert before.keys() == load_file(saved / "model.safetensors").keys()
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_full_disk_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (saved / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specheads.checkpoints.io.save_file", full)
    with pytest.raises(InputError, match="No space left on device"):
        save_native(saved, TinyHead(), TARGET)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    goal = tmp_path / "x"
    for name in ("a", "b"):
        with temporary_folder(goal) as part:
            (part / name).write_text(name)
    assert [path.name for path in goal.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_replacement_that_fails_half_way_puts_the_old_folder_back(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = (saved / "model.safetensors").read_bytes(), Path.replace

    def fails(path: Path, goal: Path) -> Path:
        if path.suffix == ".part" and path.is_dir():
            raise OSError(5, "Input/output error")
        return rename(path, goal)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(InputError, match="Input/output error"):
        save_native(saved, TinyHead(), TARGET)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_a_kill_between_the_renames_loses_nothing(saved: Path) -> None:
    head = load_draft(saved)
    aside = saved.with_name(".draft.abc.old")
    saved.replace(aside)
    assert equal(head, load_draft(saved))
    assert not aside.exists()
    saved.replace(aside)
    with pytest.raises(RuntimeError), temporary_folder(saved):  # neither does a new write that fails
        raise RuntimeError
    assert resolve_folder(saved) == saved
    assert equal(head, load_draft(saved))


def test_export_of_an_unknown_or_unfit_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format 'gguf' is not known, expected one of native, medusa, eagle3"):
        export(TinyHead(), TARGET, frozen_parts(), "gguf", tmp_path / "x")
    for name in ("medusa", "eagle3"):
        with pytest.raises(InputError, match=f"format {name} holds {name} heads, got tiny"):
            export(TinyHead(), TARGET, frozen_parts(), name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_native_export_with_a_card(tmp_path: Path) -> None:
    head = TinyHead()
    rows = {"head": {"tau": 2.3456, "prompts": 4}, "lookup": {"tau": 9.0}, "joined": {"tau": 3.0, "tokens": 7}}
    folder = export(head, TARGET, frozen_parts(), "native", tmp_path / "x", numbers=rows)
    assert equal(head, load_draft(folder, TARGET))
    card = (folder / "README.md").read_text()
    assert "|  | head | joined |" in card
    assert "| tau | 2.346 | 3 |" in card
    assert "| prompts | 4 | – |" in card
    assert "speedup" not in card
    alone = export(head, TARGET, frozen_parts(), "native", tmp_path / "y", numbers={"lookup": {"tau": 9.0}})
    assert "Nothing was measured" in (alone / "README.md").read_text()  # a look-up's numbers are not this head's
    assert "base_model: tiny" in card
    assert set(FORMATS) == {"native", "medusa", "eagle3"}


def test_rotary_angles_do_not_follow_the_dtype() -> None:
    rotary = Rotary(8, 10000.0)
    exact = rotary.inverse.clone()
    rotary.to(torch.bfloat16)
    assert torch.equal(rotary.inverse, exact)
    assert rotary.to("meta").inverse.device.type == "meta"


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_config", None), ("head", []), ("num_blocks", "x"), ("layout", 3)],
)
def test_an_edited_config_is_one_line(saved: Path, field: str, value: Any) -> None:
    config = json.loads((saved / "config.json").read_text())
    place = config if field in config else config["head_config"]
    place[field] = value
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"damaged|expected"):
        load_draft(saved)
