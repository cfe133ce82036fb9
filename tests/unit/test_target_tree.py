"""Tree forwards of every family against the model's own forwards over the paths; features; commits; masks."""

from __future__ import annotations

import pytest
import torch

from specheads.modules.kv_cache import KVCache
from specheads.target import mask as masks
from specheads.target.adapter import Target
from tests.fakes import LEAN_FAMILIES, STOCK_FAMILIES, stock_target, tiny_target

#  0 ── 1 ── 3 ── 6       the root, siblings at two depths, a path of four
#  │    └── 4
#  └── 2 ── 5
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
DEPTHS = [0, 1, 1, 2, 2, 2, 3]
ANCESTORS = torch.tensor(
    [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ],
    dtype=torch.bool,
)
KINDS = [
    *((kind, "auto") for kind in LEAN_FAMILIES),
    *((kind, "off") for kind in (*LEAN_FAMILIES[:1], *STOCK_FAMILIES)),
]


def prompts(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randint(3, 64, (length,)) for length in lengths]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def prefilled(target: Target, rows: list[torch.Tensor], room: int = 24) -> KVCache:
    """A cache that holds the rows, from one padded forward."""
    lengths = torch.tensor([len(row) for row in rows])
    cache = target.new_cache(len(rows), int(lengths.max()) + room)
    target.forward(padded(rows), cache=cache, logits="none")
    cache.commit(torch.arange(int(lengths.max())).expand(len(rows), -1), lengths)
    return cache


@torch.no_grad()
def own_logits(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """The stock model's logits over one sequence [T] -> [T, V]."""
    return target.model(input_ids=ids[None], use_cache=False).logits[0]


def path_of(node: int) -> list[int]:
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def test_causal_and_additive_masks_are_the_literal_ones() -> None:
    assert masks.causal(2, 3).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]] * 2
    low = torch.finfo(torch.bfloat16).min
    made = masks.additive(torch.tensor([[[True, False], [True, True]]]), torch.bfloat16)
    assert made.dtype == torch.bfloat16
    assert made.tolist() == [[[[0.0, low], [0.0, 0.0]]]]


def test_visible_mask_hides_the_gap_of_a_short_row() -> None:
    target = stock_target()
    cache = prefilled(target, prompts([3, 1]))
    tree = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool).expand(2, 2, 2)
    assert cache.visible(tree).int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
    ]


@pytest.mark.parametrize(("kind", "lean"), KINDS)
def test_tree_forward_equals_every_path_run_alone(kind: str, lean: str) -> None:
    target = tiny_target(kind, lean=lean)
    rows = prompts([9, 5])
    cache = prefilled(target, rows)
    nodes = torch.stack(prompts([len(PARENTS)] * 2, seed=2))
    positions = cache.lengths[:, None] + torch.tensor(DEPTHS)
    found = target.forward(nodes, positions=positions, cache=cache, tree_mask=ANCESTORS.expand(2, -1, -1)).logits
    assert found is not None
    for row, prompt in enumerate(rows):
        for node in range(len(PARENTS)):
            own = own_logits(target, torch.cat([prompt, nodes[row, path_of(node)]]))[-1]
            torch.testing.assert_close(found[row, node], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "lean"), KINDS)
def test_gather_commit_equals_a_fresh_prefill(kind: str, lean: str) -> None:
    """After a tree step in which the rows keep paths of unlike length, the next forward is that of the whole text."""
    target = tiny_target(kind, lean=lean)
    rows = prompts([4, 8])
    cache = prefilled(target, rows)
    nodes = torch.stack(prompts([len(PARENTS)] * 2, seed=3))
    positions = cache.lengths[:, None] + torch.tensor(DEPTHS)
    target.forward(nodes, positions=positions, cache=cache, tree_mask=ANCESTORS.expand(2, -1, -1), logits="none")
    kept = [[0, 1, 3, 6], [0, 2]]
    cache.commit(torch.tensor([kept[0], kept[1] + [0, 0]]), torch.tensor([4, 2]))
    assert cache.lengths.tolist() == [8, 10]
    more = torch.stack(prompts([3, 3], seed=4))
    found = target.forward(more, cache=cache).logits
    assert found is not None
    for row, prompt in enumerate(rows):
        own = own_logits(target, torch.cat([prompt, nodes[row, kept[row]], more[row]]))[-3:]
        torch.testing.assert_close(found[row], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lean", ["auto", "off"])
def test_a_wrong_mask_is_noticed(lean: str) -> None:
    """The comparison above can fail: a sibling let through changes the logits by far more than its tolerance."""
    target = tiny_target(lean=lean)
    rows = prompts([9])
    cache = prefilled(target, rows)
    nodes = torch.stack(prompts([len(PARENTS)], seed=2))
    wrong = ANCESTORS.clone()
    wrong[2, 1] = True
    positions = cache.lengths[:, None] + torch.tensor(DEPTHS)
    found = target.forward(nodes, positions=positions, cache=cache, tree_mask=wrong[None]).logits
    assert found is not None
    own = own_logits(target, torch.cat([rows[0], nodes[0, [0, 2]]]))[-1]
    assert (found[0, 2] - own).abs().max() > 1e-2


@pytest.mark.parametrize(("kind", "lean"), [("llama", "auto"), ("llama", "off"), ("gpt2", "off"), ("gemma2", "off")])
@pytest.mark.parametrize("cached", [True, False])
def test_layer_ids_are_the_inputs_of_the_layers(kind: str, lean: str, cached: bool) -> None:
    """Ids 0, 1, L-1 against forward hooks on the layers, id L against the final norm's input, in the order asked."""
    target = tiny_target(kind, lean=lean)
    decoder = target.model.get_decoder()
    layers = decoder.h if kind == "gpt2" else decoder.layers
    count = target.config.num_layers
    seen: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: seen.__setitem__(index, args[0]))
        layer.register_forward_hook(
            lambda module, args, out, index=index: seen.__setitem__(
                index + 1, out if isinstance(out, torch.Tensor) else out[0]
            )
        )
    ids = torch.stack(prompts([6, 6]))
    with torch.no_grad():
        target.model(input_ids=ids, use_cache=False)
    expected = dict(seen)
    order = (count, 0, count - 1, 1)
    cache = target.new_cache(2, 6) if cached else None
    features = target.forward(ids, cache=cache, layer_ids=order, logits="none").features
    assert features is not None
    assert features.shape == (2, 6, 4 * target.config.hidden_size)
    for part, layer in zip(features.chunk(4, dim=-1), order, strict=True):
        torch.testing.assert_close(part, expected[layer], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*LEAN_FAMILIES, *STOCK_FAMILIES])
def test_frozen_parts_compose_to_the_models_own_logits(kind: str) -> None:
    target = tiny_target(kind)
    ids = torch.stack(prompts([7]))
    raw = target.forward(ids, layer_ids=(target.config.num_layers,), logits="none").features
    assert raw is not None
    torch.testing.assert_close(
        target.parts.lm_head(target.parts.norm(raw))[0], own_logits(target, ids[0]), rtol=1e-4, atol=1e-4
    )
    entering = target.forward(ids, layer_ids=(0,), logits="none").features
    if kind != "gpt2":  # its learned positions are added to the embedding
        torch.testing.assert_close(target.parts.embed_tokens(ids), entering, rtol=1e-5, atol=1e-5)
    assert target.parts.output_weight.shape == (64, 32)


@pytest.mark.parametrize("lean", ["auto", "off"])
def test_logits_of_one_position_a_row(lean: str) -> None:
    target = tiny_target(lean=lean)
    rows = prompts([5, 3])
    every = target.forward(padded(rows)).logits
    few = target.forward(padded(rows), logits=torch.tensor([4, 2])).logits
    assert every is not None
    assert few is not None
    assert few.shape == (2, 1, 64)
    torch.testing.assert_close(few[:, 0], torch.stack([every[0, 4], every[1, 2]]), rtol=1e-5, atol=1e-5)
    for row, prompt in enumerate(rows):
        own = own_logits(target, prompt)[-1]
        torch.testing.assert_close(few[row, 0], own, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="logits"):
        target.forward(padded(rows), logits="last")


@pytest.mark.parametrize("lean", ["auto", "off"])
def test_tree_without_a_cache(lean: str) -> None:
    target = tiny_target(lean=lean)
    nodes = torch.stack(prompts([len(PARENTS)], seed=5))
    found = target.forward(nodes, positions=torch.tensor([DEPTHS]), tree_mask=ANCESTORS[None]).logits
    assert found is not None
    for node in range(len(PARENTS)):
        own = own_logits(target, nodes[0, path_of(node)])[-1]
        torch.testing.assert_close(found[0, node], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lean", ["auto", "off"])
def test_features_without_a_cache_may_enter_a_loss(lean: str) -> None:
    target = tiny_target(lean=lean)
    features = target.forward(torch.stack(prompts([4])), layer_ids=(1,), logits="none").features
    assert features is not None
    weight = torch.ones(32, requires_grad=True)
    (features * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("lean", ["auto", "off"])
def test_full_cache_and_context_limit_are_errors_that_change_nothing(lean: str) -> None:
    target = tiny_target(lean=lean, max_position_embeddings=16)
    cache = prefilled(target, prompts([6]), room=2)
    before = cache.storage.clone()
    with pytest.raises(ValueError, match="cannot take"):
        target.forward(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    assert torch.equal(before, cache.storage)
    long = prefilled(target, prompts([16]))
    with pytest.raises(ValueError, match="context limit"):
        target.forward(torch.zeros(1, 1, dtype=torch.int64), cache=long)
