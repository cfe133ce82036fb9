"""Medusa-1 (Cai et al. 2024): K heads on the target's last hidden state, each a few residual blocks and output rows.

Head i at position t reads the state after the target's final norm and predicts x(t+2+i); the target itself gives
x(t+1). So the root of a draft tree is x(t+1), and head i fills depth i + 1.

Layout "own": every head has output rows of its own, which start as the target's and are trained. Layout "shared":
the target's frozen rows serve all heads.

Legend: B rows, T positions, K heads, N anchors, J teacher positions, R ranks, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specheads.heads.base import Drafter, Head
from specheads.heads.common import RANKS, TeacherRows, check_fields, check_options, soft_targets, working_dtype
from specheads.heads.medusa_drafter import DEFAULT_PATHS, MedusaDrafter, MedusaWeights
from specheads.losses import CHUNK_BYTES, Workspace, align, chunked_cross_entropy, nothing_learnt, step_output
from specheads.modules.draft_vocab import DraftVocab
from specheads.modules.res_block import ResBlock
from specheads.tree.static import StaticTree, within
from specheads.types import FeatureSpec, FrozenParts, HeadInputs, StepOutput, TargetConfig
from specheads.utils import InputError

OPTIONS: dict[str, Any] = {
    "num_heads": 4,
    "num_blocks": 1,
    "layout": "own",
    "objective": "teacher",
    "head_decay": 0.8,
    "draft_vocab_size": None,
}


@dataclass(frozen=True)
class MedusaConfig:
    """Everything but the tensors. ``tree_paths``: the rank paths in order of measured gain, None = not yet."""

    hidden_size: int
    vocab_size: int
    num_layers: int  # of the target: the last one's output is the feature
    num_heads: int
    draft_vocab_size: int | None = None  # None = full
    num_blocks: int = 1
    layout: str = "own"
    objective: str = "teacher"
    head_decay: float = 0.8
    tree_paths: tuple[tuple[int, ...], ...] | None = None


class MedusaHead(Head):
    """K heads. ``objective`` "teacher" learns the target's distribution, "labels" the written token."""

    name: ClassVar[str] = "medusa"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: MedusaConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        self.config = config
        self.feature_spec = FeatureSpec((config.num_layers,))
        size = config.draft_vocab_size or config.vocab_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_blocks))
            for _ in range(config.num_heads)
        )
        own = config.num_heads if config.layout == "own" else 0
        self.lm_heads = nn.ModuleList(nn.Linear(config.hidden_size, size, bias=False) for _ in range(own))
        if vocab is None:  # tensors are loaded later
            vocab = DraftVocab.of(torch.arange(size), config.vocab_size)
        # the identity is not stored
        self.register_buffer("d2t", vocab.d2t.clone(), persistent=not vocab.is_full)
        self.register_buffer("t2d", vocab.t2d.clone(), persistent=not vocab.is_full)
        self.chunk_bytes = CHUNK_BYTES
        self._workspace = Workspace()
        self._teacher = TeacherRows()
        self._shared = TeacherRows()
        self._weights: MedusaWeights | None = None

    @classmethod
    def build(
        cls, target: TargetConfig, parts: FrozenParts, options: dict[str, Any], draft_ids: Tensor | None
    ) -> MedusaHead:
        """See ``Head.build``. Options: num_heads, num_blocks, layout, objective, head_decay, draft_vocab_size.

        Raises:
            InputError: an unknown option, or a value outside its range.
        """
        check_options(options, OPTIONS, "Medusa")
        merged = {**OPTIONS, **{name: value for name, value in options.items() if value is not None}}
        _check(merged)
        vocab = DraftVocab.of(draft_ids, target.vocab_size)
        merged["draft_vocab_size"] = None if vocab.is_full else vocab.size
        head = cls(MedusaConfig(target.hidden_size, target.vocab_size, target.num_layers, **merged), vocab)
        rows = parts.output_weight[vocab.ids.to(parts.output_weight.device)]
        with torch.no_grad():
            for output in head.lm_heads:
                output.weight.copy_(rows)  # type: ignore[operator]
        return head

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MedusaHead:
        """See ``Head.from_config``.

        Raises:
            InputError: a field is missing or unknown.
        """
        check_fields(config, MedusaConfig, cls.name)
        paths = config.get("tree_paths")
        return cls(MedusaConfig(**{**config, "tree_paths": paths and tuple(tuple(path) for path in paths)}))

    def config_dict(self) -> dict[str, Any]:
        """See ``Head.config_dict``."""
        paths = self.config.tree_paths
        return {**asdict(self.config), "tree_paths": paths and [list(path) for path in paths]}

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary."""
        return DraftVocab(self.d2t, self.t2d)

    def states(self, normed: Tensor) -> Tensor:
        """Normed last states [..., H] -> what each head's output rows read [..., K, H]."""
        out = []
        for blocks in self.blocks:
            x = normed
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
            out.append(x)
        return torch.stack(out, dim=-2)

    def training_step(self, inputs: HeadInputs, parts: FrozenParts, steps: int | None = None) -> StepOutput:
        """The heads' losses, weighted by ``head_decay ** i``; see ``Head.training_step``. ``steps``: at most K."""
        heads = self.config.num_heads
        ranks = 0 if torch.is_grad_enabled() else min(RANKS, self.vocab.size)
        plan = align(inputs, heads)
        if not plan.anchors.numel():
            return nothing_learnt(list(self.parameters()), heads, ranks)
        weight = self.blocks[0][0].linear.weight  # type: ignore[index]
        dtype = working_dtype(weight.device, weight.dtype)
        with torch.no_grad():
            normed = parts.norm(inputs.last_state.flatten(0, 1).index_select(0, plan.anchors)).to(weight.dtype)  # N H
        states = self.states(normed)
        pick = plan.source * heads + torch.arange(heads, device=plan.source.device)  # J K into N K
        hidden = states.flatten(0, 1).index_select(0, pick.flatten()).view(*pick.shape, -1)
        judge = self.vocab.to_draft(inputs.target_argmax.flatten()[plan.teachers])
        if self.config.objective == "labels":
            labels = self.vocab.to_draft(inputs.input_ids.flatten()[plan.teachers + 1])
            target: Callable[[slice], Tensor] = labels.__getitem__
            known = labels >= 0
        else:
            target, known = soft_targets(self._teacher, inputs, parts, plan, self.vocab, dtype), judge >= 0
        decay = self.config.head_decay ** torch.arange(heads, device=hidden.device, dtype=torch.float32)
        result = chunked_cross_entropy(
            hidden,
            self.output_rows(parts, dtype),
            target,
            judge,
            decay * plan.supervised * known[:, None],
            ranks=ranks,
            chunk_bytes=self.chunk_bytes,
            workspace=self._workspace,
        )
        return step_output(plan, result, ranks)

    def output_rows(self, parts: FrozenParts, dtype: torch.dtype) -> list[Tensor]:
        """Output rows [D, H]: one tensor for each head, or the target's for all."""
        if self.lm_heads:
            return [output.weight for output in self.lm_heads]  # type: ignore[misc]
        return [self._shared.gather(parts, None if self.vocab.is_full else self.vocab.ids, dtype)]

    def tree_policy(self, depth: int | None, top_k: int | None, nodes: int) -> StaticTree:
        """See ``Head.tree_policy``: the best of the measured paths that the limits allow."""
        paths = self.config.tree_paths or DEFAULT_PATHS
        return within(paths, depth or self.config.num_heads, top_k or self.vocab.size, nodes)

    def drafter(self, parts: FrozenParts, policy: Any = None) -> Drafter:
        """See ``Head.drafter``. ``policy``: a ``StaticTree``."""
        self._weights = MedusaWeights.of(self, parts, self._weights)
        return MedusaDrafter(self, self._weights, parts, policy)


def _check(options: dict[str, Any]) -> None:
    """Refuse what could not be trained."""
    for name in ("num_heads", "num_blocks"):
        if options[name] < 1:
            raise InputError(f"head.{name}: got {options[name]}, expected at least 1")
    for name, choices in (("layout", ("own", "shared")), ("objective", ("teacher", "labels"))):
        if options[name] not in choices:
            raise InputError(f"head.{name}: got {options[name]!r}, expected {' or '.join(choices)}")
    if not 0 < options["head_decay"] <= 1:
        raise InputError(f"head.head_decay: got {options['head_decay']}, expected above 0 and at most 1")
