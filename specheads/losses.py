"""The loss of draft heads: cross-entropy over a draft vocabulary, by chunks, so that logits are never whole in memory.

Every draft step k of an *anchor* position t learns from the *teacher* position j = t + 1 + k, the target's own
distribution for x(j+1). Worked example, row ``x0 x1 x2 x3 x4`` with ``loss_mask`` on x3 and x4, two steps:

    teacher j    2 (predicts x3)            3 (predicts x4)
    step 0       anchor 1 (has read x2)     anchor 2 (has read x3)
    step 1       anchor 0                   anchor 1

So a teacher's distribution is computed once and serves all steps, and no other position costs anything.

Legend: B rows, T positions, K draft steps, N anchors, J teacher positions, H hidden size, D draft vocabulary,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specheads.types import HeadInputs, StepOutput

CHUNK_BYTES = 64 << 20  # of one chunk's logits: a usual CPU batch is one chunk, whose gradient needs no fp32 sum


@dataclass(frozen=True)
class Alignment:
    """Who learns from whom. Flat positions are ``b * T + t``, in increasing order."""

    anchors: Tensor  # N int64: flat positions at which any step is supervised
    teachers: Tensor  # J int64: flat positions that any step learns from
    source: Tensor  # J K int64: index into anchors (0 where the step is not supervised)
    supervised: Tensor  # J K bool
    judged: Tensor  # J K bool: this step and all before it, of one anchor, are supervised
    count: Tensor  # scalar int64: supervised positions of step 0


def align(inputs: HeadInputs, steps: int) -> Alignment:
    """Anchors and teachers of a batch: step k at t is supervised where ``loss_mask[t + 2 + k]``, within the length."""
    width = inputs.input_ids.shape[1]
    device = inputs.input_ids.device
    column = torch.arange(width, device=device)
    real = inputs.loss_mask & (column < inputs.lengths[:, None])
    written = torch.zeros_like(real)  # B T: the target wrote x(j+1)
    written[:, :-1] = real[:, 1:]
    reach = torch.arange(1, steps + 1, device=device)  # K: teacher minus anchor
    supervised = written[:, :, None] & (column[:, None] >= reach)  # B T K, at the teacher
    is_anchor = torch.zeros_like(real)
    for k in range(min(steps, width - 1)):
        is_anchor[:, : width - 1 - k] |= supervised[:, k + 1 :, k]
    anchors = is_anchor.flatten().nonzero()[:, 0]
    teachers = supervised.any(-1).flatten().nonzero()[:, 0]
    number = is_anchor.flatten().cumsum(0) - 1
    supervised = supervised.flatten(0, 1)[teachers]
    source = number[(teachers[:, None] - reach).clamp(min=0)] * supervised
    judged = supervised.clone()
    for k in range(1, steps):  # where step k - 1 of the same anchor is supervised, its teacher is the one before
        judged[1:, k] &= judged[:-1, k - 1] & (teachers[1:] == teachers[:-1] + 1)
        judged[:1, k] = False
    return Alignment(anchors, teachers, source, supervised, judged, supervised[:, 0].sum())


@dataclass
class ChunkedLoss:
    """What ``chunked_cross_entropy`` returns."""

    loss: Tensor  # scalar: weighted sum
    hits: Tensor  # J K bool: the draft's best token is the judge's
    ranks: Tensor | None  # J K int64: rank of the judge's token among the draft's best R (R = not among them)


def _largest(probabilities: Tensor) -> Tensor:
    """Maximum over the last dimension. Non-negative bf16 numbers sort as their bits do, and integers are 10x faster."""
    if probabilities.dtype == torch.bfloat16 and probabilities.device.type == "cpu":
        return probabilities.view(torch.int16).amax(-1).view(torch.bfloat16)
    return probabilities.amax(-1)


def _expected_logits(states: Tensor, output: Tensor, logits: Tensor, p: Tensor) -> Tensor:
    """Sum of p x logit: c k. states: c k H, output: D H, logits: c k D, p: c D.

    In bf16 by way of p @ output, a product of c rows: reading the logits again costs more, and rounds more.
    """
    if logits.dtype == torch.bfloat16:
        return (states.float() * (p @ output).float()[:, None]).sum(-1)
    return torch.bmm(logits, p[:, :, None])[..., 0]


class Workspace:
    """Memory of one chunk's logits, kept from step to step: fresh tensors of this size cost a page fault for every
    4 KiB, measured at 5 % of a training step."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """An uninitialised tensor [rows, columns] of like's dtype and device; valid until the same name is taken."""
        size, held = rows * columns, self._buffers.get(name)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            with torch.inference_mode(False):  # evaluation may come first, and training must be able to write to it
                held = self._buffers[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(rows, columns)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of teacher positions: logits live for one chunk only.

    Nothing is recomputed in backward, since the gradient of a sum of cross-entropies is known once the softmax is:
    ``weight * (q - p)``; backward only scales it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, job: _Job, *weights: Tensor) -> Tensor:
        steps = hidden.shape[1]
        states = hidden.detach().to(job.dtype)
        outputs = [weight.detach().to(job.dtype) for weight in weights]
        need_hidden = job.training and hidden.requires_grad
        need = [job.training and weight.requires_grad for weight in weights]
        grad_hidden = torch.zeros_like(states) if need_hidden else None
        grads: list[Tensor | None] = [None] * len(weights)
        loss = torch.zeros((), dtype=torch.promote_types(job.dtype, torch.float32), device=hidden.device)
        share = steps // len(weights)  # steps that read the same output rows
        row_bytes = share * outputs[0].shape[0] * states.element_size()
        size = max(1, job.chunk_bytes // row_bytes)
        for begin in range(0, hidden.shape[0], size):
            rows = slice(begin, begin + size)
            target = job.target(rows)
            for group, output in enumerate(outputs):
                part = slice(group * share, (group + 1) * share)
                values, gradient = job.chunk(states[rows, part], output, target, rows, part)
                loss += values
                if grad_hidden is not None or need[group]:
                    scale = job.row_weights[rows, part, None].to(job.dtype)
                    flat = gradient.flatten(0, 1)
                    if grad_hidden is not None:
                        grad_hidden[rows, part] = (flat @ output).view(-1, share, output.shape[1]) * scale
                    if need[group]:
                        grads[group] = _add_product(grads[group], states[rows, part] * scale, flat)
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.shapes = [weight.shape for weight in weights]
        ctx.need = need
        ctx.hidden_dtype = hidden.dtype
        ctx.grads = (grad_hidden, grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_hidden, grads = ctx.grads
        out: list[Tensor | None] = [
            None if grad_hidden is None else (grad_hidden * grad.to(grad_hidden.dtype)).to(ctx.hidden_dtype),
            None,
        ]
        for total, dtype, shape, need in zip(grads, ctx.dtypes, ctx.shapes, ctx.need, strict=True):
            if not need:
                out.append(None)
            elif total is None:
                out.append(torch.zeros(shape, dtype=dtype, device=grad.device))
            else:
                copied = total.T.clone(memory_format=torch.contiguous_format)
                out.append(copied.to(dtype).mul_(grad.to(dtype)))
        return tuple(out)


def _add_product(total: Tensor | None, states: Tensor, gradient: Tensor) -> Tensor:
    """total + states^T gradient [H, D]; fp32 (or wider) once there is more than one chunk.

    This way round since the small factor is the one to transpose: measured 2.5x faster than gradient^T states.
    """
    product = states.flatten(0, 1).T.contiguous() @ gradient
    if total is None:
        return product
    return total.to(torch.promote_types(product.dtype, torch.float32)).add_(product)


@dataclass
class _Job:
    """The constants of one loss, and what the chunks found out on the way."""

    target: Callable[[slice], Tensor]  # -> c D logits of the target, or c int64 draft ids (hard labels)
    judge: Tensor  # J int64: draft id of the token that counts as right, -1 = none
    row_weights: Tensor  # J K
    ranks: int
    chunk_bytes: int
    dtype: torch.dtype
    training: bool
    hits: Tensor
    found: Tensor | None
    workspace: Workspace

    def chunk(self, states: Tensor, output: Tensor, target: Tensor, rows: slice, part: slice) -> tuple[Tensor, Tensor]:
        """states: c k H; output: D H -> weighted loss of the chunk, q - p [c k D] (in the workspace)."""
        flat, size = states.flatten(0, 1), output.shape[0]
        products, shares = (self.workspace.take(name, flat.shape[0], size, flat) for name in ("logits", "q"))
        logits = torch.mm(flat, output.T, out=products).view(*states.shape[:2], size)  # c k D
        q = torch.softmax(logits, dim=-1, out=shares.view(logits.shape))
        weights = self.row_weights[rows, part].to(torch.promote_types(self.dtype, torch.float32))
        hard = target.dtype == torch.int64
        known = (target if hard else self.judge[rows]).clamp(min=0)[:, None, None].expand(-1, states.shape[1], 1)
        self._judge(logits, q, rows, part)
        # log-sum-exp without another pass: logit - log q, at any one token
        picked = logits.gather(-1, known)[..., 0].to(weights.dtype)
        tiny = torch.finfo(q.dtype).tiny
        log_sum = picked - q.gather(-1, known)[..., 0].to(weights.dtype).clamp(min=tiny).log()
        if hard:
            minus = torch.full_like(known, -1, dtype=q.dtype)
            return (weights * (log_sum - picked)).sum(), q.scatter_add_(-1, known, minus)
        p = torch.softmax(target, dim=-1)
        mean = _expected_logits(states, output, logits, p).to(weights.dtype)
        return (weights * (log_sum - mean)).sum(), torch.sub(q, p[:, None], out=logits)

    def _judge(self, logits: Tensor, q: Tensor, rows: slice, part: slice) -> None:
        """Fill hits (and ranks). Ties of the best logit count as hits while training, where ranks are not asked."""
        judge = self.judge[rows, None]  # c 1
        if self.found is not None:
            best = logits.topk(min(self.ranks, logits.shape[-1]), dim=-1).indices  # c k R
            equal = (best == judge[..., None]).to(torch.uint8)
            self.found[rows, part] = torch.where(equal.amax(-1) > 0, equal.argmax(-1), self.ranks)
            self.hits[rows, part] = equal[..., 0].bool()
        else:
            own = q.gather(-1, judge.clamp(min=0)[..., None].expand(-1, q.shape[1], 1))[..., 0]
            self.hits[rows, part] = (own >= _largest(q)) & (judge >= 0)


def chunked_cross_entropy(
    hidden: Tensor,
    weights: Sequence[Tensor],
    target: Callable[[slice], Tensor],
    judge: Tensor,
    row_weights: Tensor,
    *,
    ranks: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    workspace: Workspace | None = None,
) -> ChunkedLoss:
    """Sum over teachers and steps of ``row_weights * CE(target, hidden @ weight^T)``, by chunks of teachers.

    Products run in the autocast dtype where autocast is on. Gradients flow to ``hidden`` and ``weights``.

    Args:
        hidden: J K H: what every step reads its logits from.
        weights: one [D, H] for all steps, or one for each.
        target: the target's logits [c, D] of a slice of the J teachers, or hard labels [c] int64.
        judge: J int64: the draft id that is a hit, -1 where it is not in the draft vocabulary.
        row_weights: J K: 0 where nothing is learnt.
        ranks: fill ``ranks`` up to this rank; 0 = off.
        chunk_bytes: bound of one chunk's logits.
        workspace: memory to work in, of one caller at a time; None = a fresh one.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    shape = hidden.shape[:2]
    hits = torch.zeros(shape, dtype=torch.bool, device=hidden.device)
    found = torch.zeros(shape, dtype=torch.int64, device=hidden.device) if ranks else None
    job = _Job(
        target,
        judge,
        row_weights,
        ranks,
        chunk_bytes,
        dtype,
        torch.is_grad_enabled(),
        hits,
        found,
        workspace or Workspace(),
    )
    with torch.autocast(device, enabled=False):
        loss = _ChunkedCrossEntropy.apply(hidden, job, *weights)
    return ChunkedLoss(loss, hits, found)


def step_output(plan: Alignment, result: ChunkedLoss, ranks: int = 0) -> StepOutput:
    """Counters of a training step: a hit counts where the step and all before it could be judged."""
    hits = result.hits & plan.judged
    joint = hits.clone()
    for k in range(1, hits.shape[1]):  # step k - 1 of the same anchor is one teacher earlier
        joint[1:, k] &= joint[:-1, k - 1]
    table = None
    if result.ranks is not None:
        steps = torch.arange(hits.shape[1], device=hits.device)
        cells = (steps * (ranks + 1) + result.ranks)[plan.judged]
        table = torch.bincount(cells, minlength=hits.shape[1] * (ranks + 1)).view(-1, ranks + 1)[:, :ranks]
    return StepOutput(result.loss, plan.count, hits.sum(0), joint.sum(0), plan.judged.sum(0), table)


def nothing_learnt(parameters: Sequence[Tensor], steps: int, ranks: int = 0) -> StepOutput:
    """The output of a batch without a supervised position: loss and all gradients are exactly 0."""
    device = parameters[0].device
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss = sum((parameter.flatten()[:1].sum() * 0.0 for parameter in trained), torch.zeros((), device=device))
    zeros = torch.zeros(steps, dtype=torch.int64, device=device)
    table = zeros.new_zeros(steps, ranks) if ranks else None
    return StepOutput(loss, zeros.sum(), zeros, zeros.clone(), zeros.clone(), table)
