"""The package's own heads through every format and through the trainer: weights, logits and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import TARGET as SMALL
from tiny_training import H, TinyRows, V
from torch import nn

from specheads.checkpoints import export, load_draft, save_native
from specheads.data.dataset import RowSource
from specheads.data.feature_cache import FeatureRow
from specheads.heads import HEADS
from specheads.heads.base import Head
from specheads.modules.norm import RMSNorm
from specheads.training.batches import load_batch
from specheads.training.launch import make_accelerator
from specheads.training.optim import build_optimizer
from specheads.training.settings import TrainSettings
from specheads.training.trainer import Trainer
from specheads.types import FrozenParts
from specheads.utils import InputError

TARGET = replace(SMALL, num_layers=8, intermediate_size=12)
IDS = torch.tensor([1, 2, 4, 7, 8, 15])
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "eagle3": ("eagle3", {"layer_ids": [2, 4, 8], "feature_norm": True}, IDS),
    "eagle3_full": ("eagle3", {"layer_ids": [2, 4, 8]}, None),
    "medusa": ("medusa", {"num_heads": 2, "num_blocks": 2}, None),
    "medusa_shared": ("medusa", {"num_heads": 2, "layout": "shared"}, None),
    "medusa_reduced": ("medusa", {"num_heads": 2}, IDS),
}


class Rows(RowSource):
    """Rows with the four layers' states that the heads above read."""

    def __init__(self) -> None:
        plain = TinyRows(8)
        self.layer_ids = (2, 4, 8)
        self.stored = [
            FeatureRow(r.input_ids, r.loss_mask, torch.randn(len(r.input_ids), 3, H), r.target_argmax)
            for r in plain.stored
        ]
        self.lengths, self.prompt_ids, self.categories = plain.lengths, plain.prompt_ids, plain.categories

    def rows(self, indices: Any) -> list[FeatureRow]:
        return [self.stored[index] for index in indices]


def frozen_parts() -> FrozenParts:
    torch.manual_seed(3)
    embed, rows, norm = nn.Embedding(V, H), nn.Linear(H, V, bias=False), RMSNorm(H, 1e-5)
    for module in (embed, rows, norm):
        module.requires_grad_(False)
    return FrozenParts(embed, rows, norm, rows.weight)


def make(case: str, seed: int = 0) -> tuple[Head, FrozenParts]:
    kind, options, ids = CASES[case]
    parts = frozen_parts()
    torch.manual_seed(seed)
    head = HEADS[kind].build(TARGET, parts, options, ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return head, parts


def same(a: Head, b: Head) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def loss(head: Head, parts: FrozenParts) -> float:
    torch.manual_seed(0)
    with torch.no_grad():
        return float(head.training_step(load_batch(Rows(), [0, 1, 2], head.feature_spec), parts).loss)


@pytest.mark.parametrize("case", CASES)
def test_native_and_published_round_trips(case: str, tmp_path: Path) -> None:
    head, parts = make(case)
    native = save_native(tmp_path / "native", head, TARGET)
    back = load_draft(native, TARGET)
    assert same(head, back)
    assert back.config == head.config
    folder = export(head, TARGET, parts, head.name, tmp_path / "published")
    foreign = load_draft(folder, TARGET)
    if case == "medusa_reduced":  # engines load no reduced Medusa: it comes back whole, with the same best rows
        assert foreign.config.draft_vocab_size is None
        whole = foreign.lm_heads[0].weight  # type: ignore[union-attr, index]
        assert torch.equal(whole[IDS], head.lm_heads[0].weight)  # type: ignore[union-attr, index]
        others = [token for token in range(V) if token not in IDS.tolist()]
        assert torch.equal(whole[others], parts.output_weight[others])
    else:
        assert same(head, foreign)
        assert foreign.config == head.config
        assert loss(head, parts) == loss(foreign, parts)
    # without its own file the target is not needed: the export records it
    load_draft(folder)


@pytest.mark.parametrize("case", ["eagle3", "medusa"])
def test_other_files_of_a_layout(case: str, tmp_path: Path) -> None:
    head, parts = make(case)
    folder = export(head, TARGET, parts, head.name, tmp_path / "x")
    if case == "eagle3":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    else:
        assert (folder / "medusa_lm_head.pt").exists()
        (folder / "medusa_lm_head.safetensors").unlink()
    assert same(head, load_draft(folder, TARGET))


def test_layers_0_is_read_as_midlayer(tmp_path: Path) -> None:
    head, parts = make("eagle3")
    path = export(head, TARGET, parts, "eagle3", tmp_path / "x") / "model.safetensors"
    save_file({n.replace("midlayer.", "layers.0."): t for n, t in load_file(path).items()}, path)
    assert same(head, load_draft(path.parent, TARGET))


@pytest.mark.parametrize("case", ["eagle3", "medusa_reduced"])
def test_a_mixed_up_draft_vocabulary_is_refused(case: str, tmp_path: Path) -> None:
    head, parts = make(case)
    path = save_native(tmp_path / "x", head, TARGET) / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "d2t": IDS}, path)  # absolute ids
    with pytest.raises(InputError, match="offsets"):
        load_draft(tmp_path / "x", TARGET)
    save_file({**tensors, "t2d": tensors["t2d"].roll(1)}, path)
    with pytest.raises(InputError, match="t2d"):
        load_draft(tmp_path / "x", TARGET)
    head.d2t.copy_(IDS)  # type: ignore[union-attr, operator]
    with pytest.raises(InputError, match="offsets"):
        export(head, TARGET, parts, head.name, tmp_path / "y")


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_of_an_export_is_needed(case: str, tmp_path: Path) -> None:
    head, parts = make(case)
    folder = export(head, TARGET, parts, head.name, tmp_path / "x")
    path = next(path for path in folder.glob("*.safetensors"))
    tensors = load_file(path)
    for name in tensors:
        if name == "t2d":  # engines ignore it, d2t tells it
            continue
        save_file({n: t for n, t in tensors.items() if n != name}, path)
        with pytest.raises(InputError):
            load_draft(folder, TARGET)
    save_file(tensors, path)
    load_draft(folder, TARGET)


@pytest.mark.parametrize("case", ["eagle3", "medusa"])
def test_wrong_target_of_an_export(case: str, tmp_path: Path) -> None:
    head, parts = make(case)
    folder = export(head, TARGET, parts, head.name, tmp_path / "x")
    with pytest.raises(InputError, match="fingerprint"):
        load_draft(folder, replace(TARGET, fingerprint="beef"))
    with pytest.raises(InputError, match="vocab_size"):
        load_draft(folder, replace(TARGET, vocab_size=99))


def test_low_precision_export(tmp_path: Path) -> None:
    head, parts = make("medusa_reduced")
    folder = export(head, TARGET, parts, "medusa", tmp_path / "x", dtype=torch.bfloat16)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_resumes_each_head_exactly(case: str, tmp_path: Path) -> None:
    def trainer(folder: str, steps: int) -> Trainer:
        head, parts = make(case)
        settings = TrainSettings(max_steps=steps, save_every=2, eval_every=4, warmup_steps=1, eval_draft_steps=4)
        torch.manual_seed(1)
        return Trainer(
            head, parts, Rows(), Rows(), settings, make_accelerator(cpu=True), tmp_path / folder, target_config=TARGET
        )

    whole = trainer("whole", 6).run()
    part = trainer("part", 6)
    part.log.start(0, 6, {})
    torch.manual_seed(part.settings.seed)
    for _ in range(3):  # stopped one step behind its last checkpoint
        part.train_step(part.progress())
        part.checkpoint(evaluate=False, save=part.step == 2)
    again = trainer("part", 6).run()
    a, b = (load_file(run.last / "model.safetensors") for run in (whole, again))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    start = make(case)[0].state_dict()
    assert any(not torch.equal(start[name], a[name]) for name in a)


def test_which_weights_muon_trains() -> None:
    for case, wanted in (
        ("eagle3", {"fc.weight", "qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight"}),
        ("medusa", {"linear.weight"}),
    ):
        head, _ = make(case)
        muon = build_optimizer(head, "muon").members["muon"].param_groups[0]["params"]
        ids = {id(parameter) for parameter in muon}
        names = {name for name, parameter in head.named_parameters() if id(parameter) in ids}
        assert {end for end in wanted for name in names if name.endswith(end)} == wanted
        assert all(any(name.endswith(end) for end in wanted) for name in names)
