"""EAGLE-3 (Li et al. 2025): one decoder layer over fused features, trained by training-time test.

Alignment, as served by vLLM and llama.cpp: the pair at position t is (token x(t+1), feature g(t)), rotary position t,
and predicts x(t+2). Draft step k reads x(t+1+k) and, as its feature, the pre-norm output of step k - 1 at t; rotary
position t + k; it predicts x(t+2+k). Row ``x0 x1 x2 x3``, anchor t = 0:

    step 0   reads x1, g0        at position 0   predicts x2
    step 1   reads x2, output 0  at position 1   predicts x3

Only anchors (positions with a supervised step) are computed beyond their keys and values.

Legend: B rows, T positions, K draft steps, N anchors, M anchors a row (padded), J teacher positions, H hidden size,
F = H x fused layers, W = (heads + 2 kv_heads) x head_dim, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specheads.heads.base import Drafter, Head
from specheads.heads.common import RANKS, TeacherRows, check_fields, soft_targets, working_dtype
from specheads.heads.eagle3_config import Eagle3Config, configure
from specheads.heads.eagle3_drafter import Eagle3Drafter, Eagle3Weights
from specheads.losses import (
    CHUNK_BYTES,
    Alignment,
    Workspace,
    align,
    chunked_cross_entropy,
    nothing_learnt,
    step_output,
)
from specheads.modules.anchored_attention import anchor_mask, anchored_attention
from specheads.modules.decoder_layer import DecoderLayer, LayerShape
from specheads.modules.draft_vocab import DraftVocab
from specheads.modules.norm import RMSNorm, rms_norm
from specheads.modules.rotary import Rotary
from specheads.modules.trained_ops import rotated_heads, trained_rms_norm, trained_swiglu
from specheads.tree.dynamic import DynamicTree
from specheads.types import FeatureSpec, FrozenParts, HeadInputs, StepOutput, TargetConfig


class Eagle3Head(Head):
    """The draft network. ``d2t`` and ``t2d`` are ``modules.draft_vocab`` tables."""

    name: ClassVar[str] = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        self.config = config
        self.feature_spec = FeatureSpec(config.layer_ids)
        hidden, eps, fused = config.hidden_size, config.rms_norm_eps, len(config.layer_ids)
        if config.feature_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in range(fused))
        self.fc = nn.Linear(fused * hidden, hidden, bias=False)
        self.embed_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        shape = LayerShape(
            hidden, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, eps, 2 * hidden
        )
        self.layer = DecoderLayer(shape)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if vocab is None:  # tensors are loaded later
            vocab = DraftVocab.of(torch.arange(config.draft_vocab_size), config.vocab_size)
        # the identity is not stored: engines refuse its tables
        self.register_buffer("d2t", vocab.d2t.clone(), persistent=not vocab.is_full)
        self.register_buffer("t2d", vocab.t2d.clone(), persistent=not vocab.is_full)
        self.chunk_bytes = CHUNK_BYTES
        self._workspace = Workspace()
        self._teacher = TeacherRows()
        self._weights: Eagle3Weights | None = None

    @classmethod
    def build(
        cls, target: TargetConfig, parts: FrozenParts, options: dict[str, Any], draft_ids: Tensor | None
    ) -> Eagle3Head:
        """See ``Head.build``. Options: layer_ids, feature_norm, ttt_steps, step_decay, intermediate_size, num_heads,
        num_kv_heads, head_dim, draft_vocab_size, init_output_from_target; one left out or None is the published one.

        Raises:
            InputError: an unknown option, or one that does not fit the target.
        """
        given = {name: value for name, value in options.items() if value is not None}
        from_target = given.pop("init_output_from_target", True)
        vocab = DraftVocab.of(draft_ids, target.vocab_size)
        config = configure(target, given, vocab.size)
        head = cls(config, vocab)
        if from_target:
            head.init_output(parts)
        return head

    @torch.no_grad()
    def init_output(self, parts: FrozenParts) -> None:
        """Output rows of the target, and its final norm where that is an RMS norm: the draft starts at its scale."""
        self.lm_head.weight.copy_(parts.output_weight[self.vocab.ids.to(parts.output_weight.device)])
        probe = torch.randn(2, self.config.hidden_size, generator=torch.Generator().manual_seed(0))
        probe = probe.to(parts.output_weight)
        gains = parts.norm(probe).float() / rms_norm(probe, torch.ones_like(probe[0]), self.config.rms_norm_eps).float()
        if torch.allclose(gains[0], gains[1], rtol=0.05, atol=1e-3):
            self.norm.weight.copy_(gains.mean(0))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Eagle3Head:
        """See ``Head.from_config``.

        Raises:
            InputError: a field is missing or unknown.
        """
        check_fields(config, Eagle3Config, cls.name)
        return cls(Eagle3Config(**{**config, "layer_ids": tuple(config["layer_ids"])}))

    def config_dict(self) -> dict[str, Any]:
        """See ``Head.config_dict``."""
        return {**asdict(self.config), "layer_ids": list(self.config.layer_ids)}

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary."""
        return DraftVocab(self.d2t, self.t2d)

    def feature_gains(self) -> Tensor:
        """Gains of the norms of the fused features: [layers, H]."""
        return torch.stack([norm.weight for norm in self.fc_norm])  # type: ignore[misc]

    def fuse(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Captured features [..., F] -> g [..., H]."""
        if self.config.feature_norm:
            return self._frozen_linear(features, self.fc.weight, self.feature_gains(), dtype)
        return F.linear(features.to(dtype), self.fc.weight.to(dtype))

    def _frozen_linear(self, x: Tensor, weight: Tensor, gains: Tensor, dtype: torch.dtype) -> Tensor:
        """weight @ (norm of x with gains [..., H], of each H of x), for an x that needs no gradient: with the gains
        moved into the weight, backward is one product instead of two and a norm."""
        eps = self.config.rms_norm_eps
        normed = F.rms_norm(x.unflatten(-1, (-1, gains.shape[-1])), gains.shape[-1:], None, eps).flatten(-2)
        return F.linear(normed.to(dtype), (weight * gains.flatten()).to(dtype))

    def _norm(self, x: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
        return trained_rms_norm(x, gain, self.config.rms_norm_eps, dtype)

    def training_step(self, inputs: HeadInputs, parts: FrozenParts, steps: int | None = None) -> StepOutput:
        """Training-time test with full back-propagation; see ``Head.training_step``."""
        steps = self.config.ttt_steps if steps is None else steps
        ranks = 0 if torch.is_grad_enabled() else min(RANKS, self.vocab.size)
        plan = align(inputs, steps)
        if not plan.anchors.numel():
            return nothing_learnt(list(self.parameters()), steps, ranks)
        dtype = working_dtype(self.fc.weight.device, self.fc.weight.dtype)
        states = torch.stack(self.unroll(inputs, parts, plan, steps, dtype), dim=1)  # N K H
        normed = self._norm(states, self.norm.weight, dtype)
        pick = plan.source * steps + torch.arange(steps, device=plan.source.device)  # J K into N K
        hidden = normed.flatten(0, 1).index_select(0, pick.flatten()).view(*pick.shape, -1)
        target = soft_targets(self._teacher, inputs, parts, plan, self.vocab, dtype)
        judge = self.vocab.to_draft(inputs.target_argmax.flatten()[plan.teachers])
        decay = self.config.step_decay ** torch.arange(steps, device=hidden.device, dtype=torch.float32)
        weights = decay * plan.supervised * (judge >= 0)[:, None]
        result = chunked_cross_entropy(
            hidden,
            [self.lm_head.weight],
            target,
            judge,
            weights,
            ranks=ranks,
            chunk_bytes=self.chunk_bytes,
            workspace=self._workspace,
        )
        return step_output(plan, result, ranks)

    def unroll(
        self, inputs: HeadInputs, parts: FrozenParts, plan: Alignment, steps: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Pre-norm outputs of every draft step at the anchors: K x [N, H]."""
        rows, width = inputs.input_ids.shape
        anchors, device = plan.anchors, inputs.input_ids.device
        attention = self.layer.attention
        by_token, by_state = attention.qkv_proj.weight.chunk(2, dim=1)
        by_state = by_state.to(dtype)
        rotary, slots = self.rotary, _slots(anchors, rows, width)

        # what a token adds to q, k and v is the same at every step: once for all, row t holds x(t+1)
        following = torch.cat([inputs.input_ids[:, 1:], inputs.input_ids[:, :1]], dim=1).flatten()
        with torch.no_grad():
            embedded = parts.embed_tokens(following)
        token_part = self._frozen_linear(embedded, by_token, self.embed_norm.weight, dtype)  # BT W

        state = self.fuse(inputs.features.flatten(0, 1), dtype)  # BT H
        qkv = token_part + F.linear(self._norm(state, self.hidden_norm.weight, dtype), by_state)
        positions = torch.arange(rows * width, device=device) % width
        queries, keys, values = self._heads(qkv, positions, rotary)
        keys = keys.view(rows, width, *keys.shape[1:]).transpose(1, 2)
        values = values.view(rows, width, *values.shape[1:]).transpose(1, 2)
        queries, state = queries.index_select(0, anchors), state.index_select(0, anchors)
        mask = anchor_mask(slots.positions, width, self.config.num_heads // self.config.num_kv_heads, dtype)

        own: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for k in range(steps):
            if k:
                ahead = (anchors + k).clamp(max=rows * width - 1)  # beyond the row: garbage that no loss reads
                qkv = token_part.index_select(0, ahead) + F.linear(
                    self._norm(state, self.hidden_norm.weight, dtype), by_state
                )
                queries, key, value = self._heads(qkv, anchors % width + k, rotary)
                own.append((slots.spread(key), slots.spread(value)))
            attended = anchored_attention(slots.spread(queries), keys, values, own, mask)
            state = state + attention.o_proj(slots.collect(attended))
            gate_up = self.layer.mlp.gate_up_proj(self._norm(state, self.layer.post_attention_norm.weight, dtype))
            state = state + self.layer.mlp.down_proj(trained_swiglu(gate_up))
            outputs.append(state)
        return outputs

    def _heads(self, qkv: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """qkv: n W, positions: n -> rotated queries [n heads d], rotated keys and values [n kv_heads d]."""
        config = self.config
        half = config.head_dim // 2  # both halves of a head turn by the same angles; the second's are not signed
        cos, sin = (angle[0, ..., half:] for angle in rotary(positions[None], qkv.dtype))  # n 1 d/2
        return rotated_heads(qkv, cos, sin, config.num_heads, config.num_kv_heads)

    def tree_policy(self, depth: int | None, top_k: int | None, nodes: int) -> DynamicTree:
        """See ``Head.tree_policy``."""
        return DynamicTree(depth or DynamicTree.depth, top_k or DynamicTree.top_k, nodes)

    def drafter(self, parts: FrozenParts, policy: Any = None) -> Drafter:
        """See ``Head.drafter``. ``policy``: a ``DynamicTree``."""
        self._weights = Eagle3Weights.of(self, parts, self._weights)
        return Eagle3Drafter(self, self._weights, parts, policy)


@dataclass(frozen=True)
class _Slots:
    """Anchors of a flat batch as B x M padded slots, so that attention is one call."""

    index: Tensor  # N: slot of every anchor
    positions: Tensor  # B M: its position (padding 0)

    @property
    def full(self) -> bool:
        """Whether no slot is padding, so that slots are the anchors in order."""
        return self.index.numel() == self.positions.numel()

    def spread(self, x: Tensor) -> Tensor:
        """N heads d -> B heads M d."""
        if self.full:
            out = x
        else:
            out = x.new_zeros(self.positions.numel(), *x.shape[1:]).index_copy(0, self.index, x)
        return out.reshape(*self.positions.shape, *x.shape[1:]).transpose(1, 2)

    def collect(self, x: Tensor) -> Tensor:
        """B heads M d -> N (heads d)."""
        out = x.transpose(1, 2).flatten(2).flatten(0, 1)
        return out if self.full else out.index_select(0, self.index)


def _slots(anchors: Tensor, rows: int, width: int) -> _Slots:
    """anchors: N flat positions, increasing."""
    row = anchors // width
    counts = torch.bincount(row, minlength=rows)
    widest = int(counts.max())
    first = counts.cumsum(0) - counts
    index = row * widest + torch.arange(anchors.numel(), device=anchors.device) - first[row]
    positions = torch.zeros(rows * widest, dtype=torch.int64, device=anchors.device)
    positions[index] = anchors % width
    return _Slots(index, positions.view(rows, widest))
