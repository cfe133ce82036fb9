"""The published layouts as dictionaries: golden configs, byte-equal round trips, each corruption an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_training
import torch
from torch import Tensor

from specheads.checkpoints import eagle3, medusa
from specheads.checkpoints.native import native_skeleton
from specheads.utils import InputError

H, INNER, V, D, HEADS, KV, WIDTH = 8, 12, 20, 6, 2, 1, 16  # heads x head_dim is not the hidden size
TARGET = {
    "name": "some/target", "model_type": "llama", "hidden_size": H, "vocab_size": V, "num_layers": 9,
    "context_limit": 64, "fingerprint": "f00d",
}  # fmt: skip


def eagle(draft: int = D, layers: tuple[int, ...] = (2, 4, 9), norms: bool = True) -> tuple[dict[str, Any], Any]:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    config = {
        "hidden_size": H, "intermediate_size": INNER, "num_heads": HEADS, "num_kv_heads": KV, "head_dim": WIDTH,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": None, "vocab_size": V, "draft_vocab_size": draft,
        "layer_ids": list(layers), "feature_norm": norms, "ttt_steps": 3,
    }  # fmt: skip
    tensors = {
        "fc.weight": rand(H, len(layers) * H),
        "layer.attention.qkv_proj.weight": rand((HEADS + 2 * KV) * WIDTH, 2 * H),
        "layer.attention.o_proj.weight": rand(H, HEADS * WIDTH),
        "layer.post_attention_norm.weight": rand(H),
        "layer.mlp.gate_up_proj.weight": rand(2 * INNER, H),
        "layer.mlp.down_proj.weight": rand(H, INNER),
        "embed_norm.weight": rand(H),
        "hidden_norm.weight": rand(H),
        "norm.weight": rand(H),
        "lm_head.weight": rand(draft, H),
    }
    if norms:
        tensors |= {f"fc_norm.{index}.weight": rand(H) for index in range(len(layers))}
    if draft < V:
        ids = torch.tensor([1, 2, 5, 9, 10, 19])
        t2d = torch.zeros(V, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {"d2t": ids - torch.arange(D), "t2d": t2d}
    return native_skeleton("eagle3", config, TARGET, list(layers), torch.float32), tensors


def medusa_head(layout: str = "own", draft: int | None = None, blocks: int = 2) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    config = {
        "num_layers": 9, "num_heads": 3, "num_blocks": blocks, "layout": layout, "hidden_size": H, "vocab_size": V,
        "draft_vocab_size": draft, "head_decay": 0.8,
    }  # fmt: skip
    tensors = {}
    for head in range(3):
        for block in range(blocks):
            tensors[medusa.native_block(head, block, "weight")] = torch.randn(H, H)
            tensors[medusa.native_block(head, block, "bias")] = torch.randn(H)
        if layout == "own":
            tensors[medusa.native_output(head)] = torch.randn(draft or V, H)
    if draft:
        ids = torch.tensor([0, 3, 4, 7, 8, 11])
        t2d = torch.zeros(V, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {"d2t": ids - torch.arange(draft), "t2d": t2d}
    return native_skeleton("medusa", config, TARGET, [9], torch.float32), tensors


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"draft": V}, {"norms": False}, {"layers": (9,)}])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_eagle3_round_trip(arguments: dict[str, Any], prefix: str) -> None:
    config, tensors = eagle(**arguments)
    written, out = eagle3.from_native(config, tensors)
    out = {name.replace("midlayer.", prefix): tensor for name, tensor in out.items()}
    assert eagle3.matches(written, out)
    assert not medusa.matches(written, out)
    back, again = eagle3.to_native(written, out)
    assert same(tensors, again)
    assert back == config


def test_eagle3_golden_config_and_names() -> None:
    written, out = eagle3.from_native(*eagle())
    written.pop("specheads")
    assert written == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "hidden_act": "silu", "vocab_size": 20, "draft_vocab_size": 6, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "eagle_aux_hidden_state_layer_ids": [2, 4, 9],
        "norm_before_residual": False, "norm_before_fc": False, "norm_output": False, "fc_norm": True, "bias": False,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
        "base_model_name_or_path": "some/target",
    }  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in out.items()}
    assert shapes == {
        "fc.weight": (8, 24), "fc_norm.0.weight": (8,), "fc_norm.1.weight": (8,), "fc_norm.2.weight": (8,),
        "midlayer.input_layernorm.weight": (8,), "midlayer.hidden_norm.weight": (8,),
        "midlayer.self_attn.q_proj.weight": (32, 16), "midlayer.self_attn.k_proj.weight": (16, 16),
        "midlayer.self_attn.v_proj.weight": (16, 16), "midlayer.self_attn.o_proj.weight": (8, 32),
        "midlayer.post_attention_layernorm.weight": (8,), "midlayer.mlp.gate_proj.weight": (12, 8),
        "midlayer.mlp.up_proj.weight": (12, 8), "midlayer.mlp.down_proj.weight": (8, 12), "norm.weight": (8,),
        "lm_head.weight": (6, 8), "d2t": (6,), "t2d": (20,),
    }  # fmt: skip
    assert (out["d2t"].dtype, out["t2d"].dtype) == (torch.int64, torch.bool)
    _, native = eagle()
    gate_up = torch.cat([out["midlayer.mlp.gate_proj.weight"], out["midlayer.mlp.up_proj.weight"]])
    assert torch.equal(gate_up, native["layer.mlp.gate_up_proj.weight"])


def test_eagle3_full_vocabulary_has_no_tables_and_other_layer_counts_are_said() -> None:
    written, out = eagle3.from_native(*eagle(draft=V))
    assert not {"d2t", "t2d"} & out.keys()
    assert written["draft_vocab_size"] == V
    assert eagle3.from_native(*eagle(layers=(9,)))[0]["num_aux_hidden_states"] == 1
    with pytest.raises(InputError, match="hold one twice"):
        eagle3.from_native(*eagle(layers=(4, 4, 9)))


def published() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As the reference writes it: few config fields, no t2d, no layer ids."""
    written, out = eagle3.from_native(*eagle(norms=False))
    keep = ("architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "head_dim")  # fmt: skip
    return {key: written[key] for key in keep}, {name: tensor for name, tensor in out.items() if name != "t2d"}


def test_eagle3_as_published_is_read() -> None:
    config, tensors = published()
    with pytest.raises(InputError, match=r"no eagle_aux_hidden_state_layer_ids.*name the target"):
        eagle3.to_native(config, tensors)
    with pytest.warns(UserWarning, match=r"the published \[2, 4, 6\] are taken"):
        native, again = eagle3.to_native(config, tensors, replace(tiny_training.TARGET, num_layers=9))
    assert native["feature_layers"] == [2, 4, 6]
    assert native["head_config"]["rope_theta"] == 10000.0
    assert torch.equal(again["t2d"], eagle()[1]["t2d"])
    assert native["target"]["fingerprint"] is None
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert eagle3.to_native(config, tensors)[0]["feature_layers"] == [1, 2, 3]
    with pytest.warns(UserWarning, match="embed_tokens is taken to be the target's"):
        eagle3.to_native(config, {**tensors, "embed_tokens.weight": torch.ones(V, H)})


@pytest.mark.parametrize("theta", ["rope_theta", "rope_parameters"])
def test_eagle3_rope_is_kept(theta: str) -> None:
    config, tensors = eagle()
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config["head_config"]["rope_scaling"] = scaling
    written, out = eagle3.from_native(config, tensors)
    if theta == "rope_parameters":
        del written["rope_theta"], written["rope_scaling"]
    back, _ = eagle3.to_native(written, out)
    assert back["head_config"]["rope_scaling"] == scaling
    assert back["head_config"]["rope_theta"] == 5e5


@pytest.mark.parametrize("name", sorted(eagle3.from_native(*eagle())[1]))
def test_eagle3_each_missing_tensor_is_named(name: str) -> None:
    """Only t2d may be missing: d2t tells it."""
    written, out = eagle3.from_native(*eagle())
    del out[name]
    if name == "t2d":
        assert same(eagle3.to_native(written, out)[1], eagle()[1])
        return
    if name in ("fc.weight", "midlayer.hidden_norm.weight"):
        assert not eagle3.matches(written, out)
    with pytest.raises(InputError, match="no d2t table" if name == "d2t" else f"missing {name}"):
        eagle3.to_native(written, out)


@pytest.mark.parametrize(
    ("values", "extra", "message"),
    [
        ({"norm_before_residual": True}, {}, "norm_before_residual is true"),
        ({"target_hidden_size": 16}, {}, "target_hidden_size 16 is not hidden_size 8"),
        ({"hidden_size": None}, {}, "no hidden_size"),
        ({}, {"fc.bias": torch.ones(8)}, r"unexpected fc\.bias"),
        ({}, {"midlayer.1.self_attn.q_proj.weight": torch.ones(8)}, "unexpected midlayer.1"),
        ({}, {"d2t": torch.tensor([1, 2, 5, 9, 10, 19])}, "leads outside the 20 target ids"),
        ({}, {"d2t": torch.zeros(5, dtype=torch.int64)}, r"d2t \(5 entries\)"),
        ({"fc_norm": False}, {}, r"unexpected fc_norm\.0"),
        ({"draft_vocab_size": 7}, {}, "draft_vocab_size is 7"),
    ],
)
def test_eagle3_variants_and_damage_are_refused(values: dict[str, Any], extra: dict[str, Any], message: str) -> None:
    written, out = eagle3.from_native(*eagle())
    with pytest.raises(InputError, match=message):
        eagle3.to_native({**written, **values}, {**out, **extra})


# --- Medusa ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["own", "shared"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_round_trip(layout: str, blocks: int) -> None:
    config, tensors = medusa_head(layout, blocks=blocks)
    rows = torch.randn(V, H)
    written, out = medusa.from_native(config, tensors, rows)
    assert medusa.matches(written, out)
    assert not eagle3.matches(written, out)
    if layout == "shared":
        assert all(torch.equal(out[f"{head}.{blocks}.weight"], rows) for head in range(3))
    back, again = medusa.to_native(written, out)
    assert same(tensors, again)
    assert back == config


def test_medusa_golden_config_and_names() -> None:
    written, out = medusa.from_native(*medusa_head(blocks=1))
    written.pop("specheads")
    assert written == {
        "medusa_num_heads": 3, "medusa_num_layers": 1, "medusa_fc_bias": True, "hidden_size": 8, "vocab_size": 20,
        "base_model_name_or_path": "some/target", "torch_dtype": "float32",
    }  # fmt: skip
    assert set(out) == {f"{h}.{name}" for h in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}
    numbered = [key for key in written if "num" in key and ("heads" in key or "layers" in key)]
    assert numbered == ["medusa_num_heads", "medusa_num_layers"]  # vLLM renames every such key


def test_medusa_reduced_vocabulary_is_written_whole() -> None:
    config, tensors = medusa_head(draft=6, blocks=1)
    with pytest.raises(InputError, match="needs the target's output rows"):
        medusa.from_native(config, tensors)
    rows = torch.randn(V, H)
    _, out = medusa.from_native(config, tensors, rows)
    ids = [0, 3, 4, 7, 8, 11]
    for head in range(3):
        got = out[f"{head}.1.weight"]
        assert torch.equal(got[ids], tensors[medusa.native_output(head)])
        others = [token for token in range(V) if token not in ids]
        assert torch.equal(got[others], rows[others])


def test_medusa_v2_is_read_as_shared() -> None:
    _, out = medusa.from_native(*medusa_head(blocks=1))
    heads_only = {name: tensor for name, tensor in out.items() if "linear" in name}
    target = replace(tiny_training.TARGET, num_layers=9, vocab_size=V)
    native, tensors = medusa.to_native({"medusa_num_heads": 3, "medusa_num_layers": 1}, heads_only, target)
    assert (native["feature_layers"], native["head_config"]["vocab_size"]) == ([9], V)
    assert native["head_config"]["layout"] == "shared"
    assert len(tensors) == 6
    merged = {f"medusa_head.{name}": tensor for name, tensor in out.items()}
    assert medusa.to_native({}, merged, target)[0]["head_config"]["layout"] == "own"
    with pytest.raises(InputError, match="the target's vocab_size; name the target"):
        medusa.to_native({}, heads_only)
    with pytest.raises(InputError, match="the target's layer count; name the target"):
        medusa.to_native({}, merged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "missing blocks.1.0.linear.bias"),
        (lambda t: t.pop("1.1.weight"), "missing lm_heads.1.weight"),
        (lambda t: t.pop("1.0.linear.weight"), "missing blocks.1.0.linear.weight"),
        (lambda t: t.update({"0.3.weight": torch.ones(1)}), "unexpected 0.3.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(1)}), "unexpected norm.weight"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("2.")], "medusa_num_heads is 3, but"),
    ],
)
def test_medusa_damage(change: Any, message: str) -> None:
    written, out = medusa.from_native(*medusa_head(blocks=1))
    change(out)
    with pytest.raises(InputError, match=message):
        medusa.to_native(written, out)


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear"}, {"type": "dynamic"}])
def test_eagle3_rope_that_is_not_known_is_refused(rope: dict[str, Any]) -> None:
    written, out = eagle3.from_native(*eagle())
    with pytest.raises(InputError, match="expected rope_type default, linear or llama3"):
        eagle3.to_native({**written, "rope_parameters": {**rope, "rope_theta": 1e4}}, out)
