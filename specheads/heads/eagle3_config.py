"""The configuration of an EAGLE-3 head: defaults from the target, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specheads.heads.common import check_options
from specheads.modules.rotary import inverse_frequencies
from specheads.types import TargetConfig
from specheads.utils import InputError


@dataclass(frozen=True)
class Eagle3Config:
    """Everything but the tensors."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, object] | None = None
    feature_norm: bool = False
    ttt_steps: int = 3
    step_decay: float = 0.8


def configure(target: TargetConfig, given: dict[str, Any], draft_vocab_size: int) -> Eagle3Config:
    """Options over the target's facts, checked.

    Raises:
        InputError: an unknown option, or one that could not be trained or served.
    """
    depth = target.num_layers
    facts: dict[str, Any] = {
        "layer_ids": (2, depth // 2, depth - 3),
        "feature_norm": False,
        "intermediate_size": target.intermediate_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "ttt_steps": 3,
        "step_decay": 0.8,
        "draft_vocab_size": draft_vocab_size,
    }
    check_options(given, facts, "EAGLE-3")
    merged = {**facts, **given, "draft_vocab_size": draft_vocab_size}
    merged["layer_ids"] = tuple(merged["layer_ids"])
    _check(merged, depth)
    try:
        inverse_frequencies(merged["head_dim"], target.rope_theta, target.rope_scaling)
    except ValueError as error:
        raise InputError(f"target: {error}; train a Medusa head for this target") from error
    return Eagle3Config(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        **merged,
    )


def _check(options: dict[str, Any], depth: int) -> None:
    """Refuse what could not be trained or served."""
    layers = options["layer_ids"]
    if not layers or len(set(layers)) != len(layers) or not all(0 <= layer <= depth for layer in layers):
        raise InputError(
            f"head.layer_ids: got {list(layers)}, expected distinct ids in 0..{depth} (id {depth} is the last layer's "
            "output); a target of fewer than 7 layers needs them given"
        )
    if options["num_heads"] % options["num_kv_heads"]:
        raise InputError(
            f"head.num_heads: got {options['num_heads']}, expected a multiple of num_kv_heads {options['num_kv_heads']}"
        )
    for name in ("ttt_steps", "intermediate_size", "num_kv_heads"):
        if options[name] < 1:
            raise InputError(f"head.{name}: got {options[name]}, expected at least 1")
    if options["head_dim"] % 2:
        raise InputError(f"head.head_dim: got {options['head_dim']}, expected an even number (rotary pairs)")
    if not 0 < options["step_decay"] <= 1:
        raise InputError(f"head.step_decay: got {options['step_decay']}, expected above 0 and at most 1")
