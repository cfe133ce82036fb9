"""EAGLE-3's training step against a slow plain implementation: position by position, step by step."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_heads import DRAFT_IDS, VOCAB, apart, batch, build, frozen_parts, row_of
from torch import Tensor

from specheads.heads.eagle3 import Eagle3Head
from specheads.types import FrozenParts, HeadInputs
from specheads.utils import InputError


def plain_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * gain


def plain_rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector [d], pair (i, i + d/2) turned by position * theta^(-2i/d)."""
    half = x.shape[0] // 2
    out = []
    for part in (0, 1):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[0])
            a, b = x[i], x[i + half]
            out.append(
                a * math.cos(angle) - b * math.sin(angle) if part == 0 else b * math.cos(angle) + a * math.sin(angle)
            )
    return torch.stack(out)


class PlainEagle:
    """A draft chain from anchor t: a list of (key, value) per step, nothing shared between anchors."""

    def __init__(self, head: Eagle3Head, parts: FrozenParts) -> None:
        self.p = dict(head.named_parameters())
        self.c, self.parts = head.config, parts

    def fused(self, feature: Tensor) -> Tensor:
        pieces = feature.split(self.c.hidden_size)
        if self.c.feature_norm:
            pieces = [plain_norm(x, self.p[f"fc_norm.{i}.weight"]) for i, x in enumerate(pieces)]
        return self.p["fc.weight"] @ torch.cat(list(pieces))

    def qkv(self, token: Tensor, g: Tensor, position: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        c = self.c
        e = plain_norm(self.parts.embed_tokens(token), self.p["embed_norm.weight"])
        x = torch.cat([e, plain_norm(g, self.p["hidden_norm.weight"])])
        out = (self.p["layer.attention.qkv_proj.weight"] @ x).split(c.head_dim)
        queries = [plain_rotate(v, position, c.rope_theta) for v in out[: c.num_heads]]
        keys = [plain_rotate(v, position, c.rope_theta) for v in out[c.num_heads : c.num_heads + c.num_kv_heads]]
        return queries, keys, list(out[c.num_heads + c.num_kv_heads :])

    def finish(self, g: Tensor, queries: list[Tensor], cache: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        c, heads = self.c, []
        for h, query in enumerate(queries):
            kv = h // (c.num_heads // c.num_kv_heads)
            scores = torch.stack([query @ keys[kv] for keys, _ in cache]) / math.sqrt(c.head_dim)
            weights = torch.softmax(scores, 0)
            heads.append(sum(w * values[kv] for w, (_, values) in zip(weights, cache, strict=True)))
        x = g + self.p["layer.attention.o_proj.weight"] @ torch.cat(heads)
        n = plain_norm(x, self.p["layer.post_attention_norm.weight"])
        gate, up = (self.p["layer.mlp.gate_up_proj.weight"] @ n).chunk(2)
        return x + self.p["layer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    def logits(self, x: Tensor) -> Tensor:
        return self.p["lm_head.weight"] @ plain_norm(x, self.p["norm.weight"])

    def chain(self, ids: Tensor, features: Tensor, t: int, steps: int) -> list[Tensor]:
        """Logits of steps 0..steps-1 at anchor t of one row: true tokens, own features."""
        g = [self.fused(features[i]) for i in range(t + 1)]
        first = [self.qkv(ids[i + 1], g[i], i) for i in range(t + 1)]
        cache = [(keys, values) for _, keys, values in first]
        x = self.finish(g[t], first[t][0], cache)
        out = [self.logits(x)]
        for k in range(1, steps):
            if t + 1 + k >= len(ids):
                break
            queries, keys, values = self.qkv(ids[t + 1 + k], x, t + k)
            cache = [*cache, (keys, values)]
            x = self.finish(x, queries, cache)
            out.append(self.logits(x))
        return out


def plain_loss(head: Eagle3Head, parts: FrozenParts, inputs: HeadInputs, steps: int, ids: Tensor) -> dict[str, object]:
    """The published objective with the right shift, by loops over rows, positions and steps."""
    plain, loss, count = PlainEagle(head, parts), torch.zeros(()), 0
    hits, joint, judged = [0] * steps, [0] * steps, [0] * steps
    for b in range(len(inputs.lengths)):
        length = int(inputs.lengths[b])
        for t in range(length - 1):
            logits = plain.chain(inputs.input_ids[b, :length], inputs.features[b], t, steps)
            so_far = seen = True
            for k in range(steps):
                label = t + 2 + k
                supervised = label < length and bool(inputs.loss_mask[b, label])
                seen = seen and supervised
                if not supervised:
                    continue
                count += k == 0
                best = int(inputs.target_argmax[b, t + 1 + k])
                if seen:
                    judged[k] += 1
                    right = int(ids[logits[k].argmax()]) == best
                    so_far = so_far and right
                    hits[k] += right
                    joint[k] += so_far
                if best not in ids.tolist():
                    continue
                full = parts.lm_head(parts.norm(inputs.last_state[b, t + 1 + k]))
                p = torch.softmax(full[ids], 0)
                loss = loss - head.config.step_decay**k * (p * torch.log_softmax(logits[k], 0)).sum()
    return {"loss": loss, "count": count, "hits": hits, "joint": joint, "judged": judged}


def gradients(head: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    head.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


@pytest.mark.parametrize("feature_norm", [True, False])
@pytest.mark.parametrize("draft_ids", [DRAFT_IDS, None], ids=["reduced", "full"])
def test_loss_counts_and_gradients_are_those_of_the_slow_loops(feature_norm: bool, draft_ids: Tensor | None) -> None:
    parts = frozen_parts()
    head = build("eagle3", parts, draft_ids, feature_norm=feature_norm)
    inputs = batch("eagle3", (9, 6), masks=(3, 2))
    ids = DRAFT_IDS if draft_ids is not None else torch.arange(VOCAB)
    want = plain_loss(head, parts, inputs, 3, ids)
    expected = gradients(head, want["loss"])
    got = head.training_step(inputs, parts)
    assert torch.allclose(got.loss, want["loss"], rtol=1e-5)
    assert int(got.count) == want["count"] > 0
    assert [got.hits.tolist(), got.joint_hits.tolist(), got.steps.tolist()] == [
        want["hits"],
        want["joint"],
        want["judged"],
    ]
    for name, gradient in gradients(head, got.loss).items():
        assert apart(gradient, expected[name]) < 1e-5, name
        assert gradient.abs().max() > 0, name


def test_hits_are_counted_where_there_are_some() -> None:
    """The reference counters above are mostly 0 for a random head; here the judge is the head's own guess."""
    parts = frozen_parts()
    head = build("eagle3", parts)
    inputs = batch("eagle3", (9, 6))
    plain = PlainEagle(head, parts)
    for b in range(2):
        for t in range(int(inputs.lengths[b]) - 2):
            for k, logits in enumerate(plain.chain(inputs.input_ids[b], inputs.features[b], t, 2)):
                if (t + k) % 3 and t + 1 + k < inputs.target_argmax.shape[1]:
                    inputs.target_argmax[b, t + 1 + k] = DRAFT_IDS[logits.argmax()]
    want = plain_loss(head, parts, inputs, 3, DRAFT_IDS)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            got = head.training_step(inputs, parts)
        assert [got.hits.tolist(), got.joint_hits.tolist()] == [want["hits"], want["joint"]]
        assert want["hits"][0] > 2
    assert got.rank_hits is not None
    assert torch.equal(got.rank_hits[:, 0], got.hits)
    assert (got.rank_hits.sum(1) <= got.steps).all()


def test_padding_and_other_rows_change_nothing() -> None:
    parts = frozen_parts()
    head = build("eagle3", parts)
    inputs = batch("eagle3", (9, 6), width=14)
    whole = head.training_step(inputs, parts)
    whole_gradients = gradients(head, whole.loss)
    loss, total = 0.0, None
    for row in (0, 1):
        out = head.training_step(row_of(inputs, row), parts)
        found = gradients(head, out.loss)
        loss += out.loss.item()
        total = found if total is None else {name: total[name] + found[name] for name in total}
    assert abs(whole.loss.item() - loss) < 1e-6 * abs(loss)
    for name, gradient in whole_gradients.items():
        assert apart(gradient, total[name]) < 3e-6, name


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("lengths", [(9, 6), (2, 1)])
def test_nothing_supervised_gives_exactly_zero(kind: str, lengths: tuple[int, ...]) -> None:
    parts = frozen_parts()
    head = build(kind, parts)
    inputs = batch(kind, lengths)
    inputs.loss_mask[:] = len(lengths) and max(lengths) < 3
    out = head.training_step(inputs, parts)
    assert out.loss.item() == 0
    assert int(out.count) == 0
    assert all((gradient == 0).all() for gradient in gradients(head, out.loss).values())


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_one_row_without_supervision_adds_nothing(kind: str) -> None:
    parts = frozen_parts()
    head = build(kind, parts)
    inputs = batch(kind, (9, 6))
    alone = head.training_step(row_of(inputs, 0), parts)
    inputs.loss_mask[1] = False
    both = head.training_step(inputs, parts)
    assert int(alone.count) == int(both.count)
    assert torch.allclose(alone.loss, both.loss, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_other_numbers_of_steps(steps: int) -> None:
    parts = frozen_parts()
    head = build("eagle3", parts)
    inputs = batch("eagle3", (9, 6))
    want = plain_loss(head, parts, inputs, steps, DRAFT_IDS)
    got = head.training_step(inputs, parts, steps=steps)
    assert torch.allclose(got.loss, want["loss"], rtol=1e-5)
    assert got.steps.tolist() == want["judged"]


def test_large_features_in_bf16_stay_finite() -> None:
    parts = frozen_parts(dtype=torch.bfloat16)
    head = build("eagle3", parts)
    inputs = batch("eagle3", (9, 6))
    inputs.features = (inputs.features * 22_574).bfloat16()
    inputs.last_state = inputs.last_state.bfloat16()
    exact = head.training_step(inputs, parts)
    with torch.autocast("cpu", torch.bfloat16):
        out = head.training_step(inputs, parts)
    found = gradients(head, out.loss)
    assert all(gradient.isfinite().all() and gradient.dtype == torch.float32 for gradient in found.values())
    assert torch.allclose(out.loss, exact.loss, rtol=0.03)
    reference = gradients(head, exact.loss)
    for name, gradient in found.items():
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), reference[name].flatten(), 0) > 0.98, name


def test_a_soft_capped_target_teaches_its_capped_logits() -> None:
    parts = frozen_parts()
    capped = FrozenParts(
        parts.embed_tokens, lambda x: 4 * torch.tanh(parts.lm_head(x) / 4), parts.norm, parts.output_weight
    )
    head = build("eagle3", parts)
    inputs = batch("eagle3", (9, 6))
    want = plain_loss(head, capped, inputs, 3, DRAFT_IDS)["loss"]
    plain = head.training_step(inputs, parts).loss
    assert torch.allclose(build("eagle3", parts).training_step(inputs, capped).loss, want, rtol=1e-5)
    assert not torch.allclose(plain, want, rtol=1e-3)


def test_a_fresh_head_has_the_targets_rows_and_norm() -> None:
    from tiny_heads import target_config

    from specheads.heads import HEADS

    parts = frozen_parts()
    head = HEADS["eagle3"].build(target_config(), parts, {"layer_ids": (3, 5, 6)}, DRAFT_IDS)
    x = torch.randn(3, 16)
    assert torch.allclose(head.lm_head(head.norm(x)), parts.lm_head(parts.norm(x))[:, DRAFT_IDS], atol=1e-4)
    other = HEADS["eagle3"].build(
        target_config(), parts, {"layer_ids": (3, 5, 6), "init_output_from_target": False}, DRAFT_IDS
    )
    assert not torch.allclose(other.lm_head.weight, parts.output_weight[DRAFT_IDS])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"layer_ids": (2, 2, 3)}, "distinct"),
        ({"layer_ids": (2, 7)}, "0..6"),
        ({}, "layer_ids"),
        ({"layer_ids": (1, 2), "num_heads": 3}, "multiple"),
        ({"layer_ids": (1, 2), "head_dim": 5}, "even"),
        ({"layer_ids": (1, 2), "step_decay": 0.0}, "step_decay"),
        ({"layer_ids": (1, 2), "tt_steps": 3}, "unknown option"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], word: str) -> None:
    from tiny_heads import target_config

    with pytest.raises(InputError, match=word):
        Eagle3Head.build(target_config(num_layers=5 if not options else 6), frozen_parts(), options, DRAFT_IDS)


def test_configuration_round_trip() -> None:
    parts = frozen_parts()
    head = build("eagle3", parts)
    again = Eagle3Head.from_config(head.config_dict())
    again.load_state_dict(head.state_dict())
    inputs = batch("eagle3")
    assert torch.equal(again.training_step(inputs, parts).loss, head.training_step(inputs, parts).loss)
    assert {"d2t", "t2d"} <= set(head.state_dict())
    assert not {"d2t", "t2d"} & set(build("eagle3", parts, None).state_dict())
    with pytest.raises(InputError, match="missing"):
        Eagle3Head.from_config({"hidden_size": 3})
