"""Records that cross the floors: features, frozen parts, training inputs, drafts' verdicts, generations.

Shape legend: B rows, T positions, N tree nodes, P path length, K draft steps, H hidden size, V vocabulary,
F = H x number of captured layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FeatureSpec:
    """The target's hidden states that a head reads.

    ``layer_ids``: id ``i`` is the residual stream that *enters* layer ``i`` (after ``i`` layers), without a norm;
    id ``L`` (the number of layers) is the raw output of the last layer, before the final norm. This is the
    convention of vLLM's ``eagle_aux_hidden_state_layer_ids``. The features of a position are these states,
    concatenated in the order given: ``F = len(layer_ids) * H``.
    """

    layer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class FrozenParts:
    """What a head may use of the target: read only, never a parameter of the head."""

    embed_tokens: nn.Module  # ids [...] -> [..., H], as the target itself embeds (scaling included)
    lm_head: Callable[[Tensor], Tensor]  # normed hidden [..., H] -> logits [..., V]
    norm: Callable[[Tensor], Tensor]  # raw last state [..., H] -> what lm_head reads
    output_weight: Tensor  # V H: rows of the output projection


@dataclass(frozen=True)
class TargetConfig:
    """The facts about a target that heads, caches and exports need."""

    name: str  # model id or folder as the user gave it
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding
    context_limit: int  # positions the target was made for
    eos_ids: tuple[int, ...]  # union of generation config, config and tokenizer
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, object] | None  # Hugging Face rope parameters other than theta; None = plain rotary
    fingerprint: str  # sha256 prefix over the identity of the weights and the configuration
    tie_word_embeddings: bool = False


@dataclass
class TargetOutput:
    """One target forward."""

    logits: Tensor | None  # B N V (or B 1 V when one position a row was asked for), or None
    features: Tensor | None  # B N F, or None when no layer was asked for


@dataclass
class HeadInputs:
    """One training batch of rows padded on the right to T.

    Worked alignment, row ``x0 x1 x2 x3``: ``features[t]`` and ``last_state[t]`` were computed from ``x0..xt``;
    ``target_argmax[t]`` is the target's own best guess for ``x(t+1)``; ``loss_mask[t]`` says that ``xt`` was written
    by the target (so it may be a *label*). Padding is known by ``lengths`` only, never by an id.
    """

    input_ids: Tensor  # B T int64
    features: Tensor  # B T F: the head's FeatureSpec, concatenated
    last_state: Tensor  # B T H: raw last layer output (layer id L); FrozenParts.norm makes it what lm_head reads
    target_argmax: Tensor  # B T int64
    loss_mask: Tensor  # B T bool
    lengths: Tensor  # B int64

    def to(self, device: torch.device | str) -> HeadInputs:
        """The same batch on another device."""
        return HeadInputs(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass
class StepOutput:
    """What a head's training step returns: sums, so that the trainer can normalise over the whole optimiser step."""

    loss: Tensor  # scalar: sum over supervised positions (and draft steps, weighted); divide by the global count
    count: Tensor  # scalar int64: supervised positions (0 is legal: loss and gradients are then exactly zero)
    hits: Tensor  # K int64: draft step k was right (argmax equals the target's argmax), whatever came before it
    joint_hits: Tensor  # K int64: steps 0..k were all right; chain acceptance length = 1 + sum(joint_hits / steps)
    steps: Tensor  # K int64: positions at which step k could be judged
    rank_hits: Tensor | None = None  # K R int64: the target's argmax was the draft's rank-r guess (for static trees)


@dataclass
class Verdict:
    """What a verifier decided on a tree of N nodes (node 0 is the root, which is always committed).

    ``path`` holds node ids root first; entries at and beyond ``counts`` are 0 and mean nothing.
    The tokens that the step emits are those of path[1:counts] and then ``bonus``.
    """

    path: Tensor  # B P int64
    counts: Tensor  # B int64: accepted nodes, root included (>= 1)
    bonus: Tensor  # B int64: the target's own token after the last accepted node


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits. temperature 0 is greedy (ties: the lowest id)."""

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    seed: int | None = None


@dataclass
class DecodeStats:
    """Counters of one generate call, from ids and never from text. One entry a row where a list is said."""

    target_forwards: list[int] = field(default_factory=list)  # verify steps a row took part in (prefill not counted)
    emitted: list[int] = field(default_factory=list)  # new tokens, the prefill's own token not counted
    accepted_at_least: list[int] = field(default_factory=list)  # [d-1]: steps in which >= d drafts were accepted
    drafted_at_least: list[int] = field(default_factory=list)  # [d-1]: steps whose tree reached depth d
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0  # verification, commit and bookkeeping
    prefill_seconds: float = 0.0
    tree_nodes: int = 0  # nodes sent to the target over all steps, roots included


@dataclass
class GenerationOutput:
    """New tokens of every row.

    ``finish``: ``"stop"`` (an EOS, which is the last id kept), ``"stop_string"`` or ``"length"``.
    """

    tokens: list[list[int]]
    finish: list[str]
    stats: DecodeStats
    seconds: float
