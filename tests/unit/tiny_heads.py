"""A tiny random target's frozen parts, configurations and batches for the head tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specheads.heads import HEADS
from specheads.heads.base import Head
from specheads.modules.norm import rms_norm
from specheads.types import FrozenParts, HeadInputs, TargetConfig

HIDDEN, VOCAB, LAYERS = 16, 40, 6


def target_config(**changes: Any) -> TargetConfig:
    facts: dict[str, Any] = {
        "name": "tiny",
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCAB,
        "context_limit": 128,
        "eos_ids": (1,),
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "rope_scaling": None,
        "fingerprint": "f",
    }
    return TargetConfig(**{**facts, **changes})


def frozen_parts(vocab: int = VOCAB, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> FrozenParts:
    generator = torch.Generator().manual_seed(1)
    embed = nn.Embedding(vocab, hidden)
    embed.weight = nn.Parameter(torch.randn(vocab, hidden, generator=generator).to(dtype), requires_grad=False)
    rows = torch.randn(vocab, hidden, generator=generator).to(dtype)
    gains = (torch.rand(hidden, generator=generator) + 0.5).to(dtype)
    return FrozenParts(embed, lambda x: x @ rows.T, lambda x: rms_norm(x, gains, 1e-5), rows)


DRAFT_IDS = torch.tensor([0, 1, 3, 4, 7, 9, 12, 13, 14, 20, 21, 25, 30, 33, 36, 39])


def build(kind: str, parts: FrozenParts, draft_ids: Tensor | None = DRAFT_IDS, seed: int = 0, **options: Any) -> Head:
    """A head whose every parameter is random (fresh ones have zeros and ones that hide mistakes)."""
    torch.manual_seed(seed)
    if kind == "eagle3":
        options = {"layer_ids": (3, 5, 6), "feature_norm": True, "ttt_steps": 3, **options}
    head = HEADS[kind].build(target_config(), parts, options, draft_ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return head


def batch(
    kind: str,
    lengths: tuple[int, ...] = (9, 6),
    masks: Any = None,
    layers: int = 3,
    seed: int = 5,
    width: int | None = None,
) -> HeadInputs:
    """Rows of the given lengths; what lies in the padding is large, so that a leak shows."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), width or max(lengths)
    ids = torch.randint(0, VOCAB, (rows, width), generator=generator)
    size = HIDDEN * (layers if kind == "eagle3" else 1)
    features = torch.randn(rows, width, size, generator=generator)
    last = torch.randn(rows, width, HIDDEN, generator=generator)
    argmax = DRAFT_IDS[torch.randint(0, len(DRAFT_IDS), (rows, width), generator=generator)]
    argmax[:, ::4] = 2  # a token outside the draft vocabulary
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        begin = 3 if masks is None else masks[row]
        mask[row, begin:] = True  # runs into the padding on purpose: only lengths say what is real
        features[row, length:] = 1e3
        last[row, length:] = 1e3
    return HeadInputs(ids, features, last, argmax, mask, torch.tensor(lengths))


def row_of(inputs: HeadInputs, row: int) -> HeadInputs:
    """One row as a batch of its own."""
    return HeadInputs(**{name: value[row : row + 1] for name, value in vars(inputs).items()})


def large_problem(kind: str) -> tuple[TargetConfig, FrozenParts, HeadInputs]:
    """A vocabulary of 3,000 and 512 tokens, nearly all supervised: large beside everything else of the head."""
    vocab, rows, width = 3000, 16, 32
    parts = frozen_parts(vocab)
    generator = torch.Generator().manual_seed(0)
    size = HIDDEN * (3 if kind == "eagle3" else 1)
    inputs = HeadInputs(
        torch.randint(0, vocab, (rows, width), generator=generator),
        torch.randn(rows, width, size, generator=generator),
        torch.randn(rows, width, HIDDEN, generator=generator),
        torch.randint(0, vocab // 2, (rows, width), generator=generator) * 2,
        torch.ones(rows, width, dtype=torch.bool),
        torch.full((rows,), width),
    )
    return target_config(vocab_size=vocab), parts, inputs


def apart(one: Tensor, other: Tensor) -> float:
    """Largest difference, as a share of the largest value: what rounding is measured by."""
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))
