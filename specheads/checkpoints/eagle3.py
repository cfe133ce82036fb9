"""The published EAGLE-3 layout, as the reference, vLLM, SGLang and llama.cpp read it.

| native                             | published (``midlayer.`` is also seen as ``layers.0.``)                    |
|------------------------------------|----------------------------------------------------------------------------|
| fc.weight, fc_norm.{i}.weight      | the same (fc_norm with the config flag; vLLM only)                         |
| embed_norm, hidden_norm            | midlayer.input_layernorm, midlayer.hidden_norm                             |
| layer.attention.qkv_proj           | midlayer.self_attn.q_proj, k_proj, v_proj (rows, in this order)            |
| layer.attention.o_proj             | midlayer.self_attn.o_proj                                                  |
| layer.post_attention_norm          | midlayer.post_attention_layernorm                                          |
| layer.mlp.gate_up_proj, down_proj  | midlayer.mlp.gate_proj, up_proj (rows, in this order), down_proj           |
| norm, lm_head                      | the same                                                                   |
| d2t (offsets int64), t2d (bool)    | the same; absent where the draft vocabulary is the target's                |

The embedding is the target's and not stored. Layer ids count as everywhere here: id i is the input of layer i.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specheads.checkpoints.io import key_faults
from specheads.checkpoints.native import NativeConfig, native_skeleton
from specheads.modules.rotary import inverse_frequencies
from specheads.types import TargetConfig
from specheads.utils import InputError

NAME = "eagle3"
HEADS = ("eagle3",)
READERS = "specheads, vLLM, SGLang, llama.cpp (three feature layers, no fc_norm), the reference (no fc_norm)"
FILES = ("model.safetensors",)

SAME = {
    "fc.weight": "fc.weight",
    "embed_norm.weight": "midlayer.input_layernorm.weight",
    "hidden_norm.weight": "midlayer.hidden_norm.weight",
    "layer.attention.o_proj.weight": "midlayer.self_attn.o_proj.weight",
    "layer.post_attention_norm.weight": "midlayer.post_attention_layernorm.weight",
    "layer.mlp.down_proj.weight": "midlayer.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
QKV = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
GATE_UP = ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight")
UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "norm_output", "attention_bias", "mlp_bias")


def matches(config: dict[str, Any], keys: Iterable[str]) -> bool:
    """By keys: a fused-feature layer and the EAGLE-3 norm of it."""
    names = {name.replace("layers.0.", "midlayer.", 1) for name in keys}
    return "fc.weight" in names and "midlayer.hidden_norm.weight" in names


def from_native(
    config: NativeConfig, tensors: dict[str, Tensor], output_weight: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors) of the published layout. ``output_weight`` is not needed: the head has its own rows.

    Raises:
        InputError: the head is of another kind, or reads one layer twice (engines merge duplicates, then fail).
    """
    if config["head"] not in HEADS:
        raise InputError(f"export: format {NAME} holds {', '.join(HEADS)} heads, got {config['head']}; choose another")
    head, target = config["head_config"], config["target"]
    layers = list(config["feature_layers"])
    if len(set(layers)) != len(layers):
        raise InputError(f"export: feature layers {layers} hold one twice, which engines merge; train distinct layers")
    out = {theirs: tensors[ours] for ours, theirs in SAME.items()}
    width = head["head_dim"]
    rows = [head["num_heads"] * width, head["num_kv_heads"] * width, head["num_kv_heads"] * width]
    out |= dict(zip(QKV, tensors["layer.attention.qkv_proj.weight"].split(rows), strict=True))
    out |= dict(zip(GATE_UP, tensors["layer.mlp.gate_up_proj.weight"].chunk(2), strict=True))
    out |= {name: tensor for name, tensor in tensors.items() if name.startswith("fc_norm.")}
    if tensors["lm_head.weight"].shape[0] != target["vocab_size"]:
        out |= {"d2t": tensors["d2t"], "t2d": tensors["t2d"]}
    return _published_config(config, out), out


def _published_config(config: NativeConfig, tensors: dict[str, Tensor]) -> dict[str, Any]:
    head, target, layers = config["head_config"], config["target"], list(config["feature_layers"])
    scaling = head.get("rope_scaling")
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": head["rope_theta"]}
    published: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head["hidden_size"],
        "intermediate_size": head["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": head["num_heads"],
        "num_key_value_heads": head["num_kv_heads"],
        "head_dim": head["head_dim"],
        "hidden_act": "silu",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
        "max_position_embeddings": target["context_limit"],
        "rms_norm_eps": head["rms_norm_eps"],
        "rope_theta": head["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": any(name.startswith("fc_norm.") for name in tensors),
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "base_model_name_or_path": target["name"],
        "specheads": {"head_config": head, "target": target},
    }
    if len(layers) != 3:  # three is what engines take for granted
        published["num_aux_hidden_states"] = len(layers)
    return published


def to_native(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetConfig | None = None
) -> tuple[NativeConfig, dict[str, Tensor]]:
    """(native config, native tensors). ``target``: fills in what published configs leave to the reader to know.

    Raises:
        InputError: tensors are missing or left over, or the config names a variant that this head is not.
    """
    _refuse_variants(config)
    theirs = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    layers = _layers(config, target)
    has_norms = config.get("fc_norm", any(name.startswith("fc_norm.") for name in theirs))
    norms = {f"fc_norm.{index}.weight" for index in range(len(layers))} if has_norms else set()
    wanted = {*SAME.values(), *QKV, *GATE_UP, *norms}
    missing = wanted - theirs.keys()
    unexpected = theirs.keys() - wanted - {"d2t", "t2d", "embed_tokens.weight"}
    if missing or unexpected:
        raise InputError(
            f"EAGLE-3 checkpoint: {key_faults(missing, unexpected)}; the file is incomplete or of another kind of draft"
        )
    if "embed_tokens.weight" in theirs:
        warnings.warn("EAGLE-3 checkpoint: embed_tokens is taken to be the target's and not kept", stacklevel=2)
    native = {ours: theirs[name] for ours, name in SAME.items()} | {name: theirs[name] for name in norms}
    native["layer.attention.qkv_proj.weight"] = torch.cat([theirs[name] for name in QKV])
    native["layer.mlp.gate_up_proj.weight"] = torch.cat([theirs[name] for name in GATE_UP])
    return _native_config(config, theirs, layers), native | _native_tables(config, theirs)


def _refuse_variants(config: dict[str, Any]) -> None:
    for flag in UNSUPPORTED:
        if config.get(flag):
            raise InputError(f"EAGLE-3 checkpoint: {flag} is true, which this head does not have; use another draft")
    if config.get("target_hidden_size", config.get("hidden_size")) != config.get("hidden_size"):
        raise InputError(
            f"EAGLE-3 checkpoint: target_hidden_size {config['target_hidden_size']} is not hidden_size "
            f"{config.get('hidden_size')}: a draft with an embedding of its own, which is not supported"
        )
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(config.get(field), int):
            raise InputError(f"EAGLE-3 checkpoint: config.json has no {field}, expected a number; fetch it again")


def _native_tables(config: dict[str, Any], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """d2t and t2d of a reduced draft vocabulary; the identity is left out, as natively. An absent t2d is computed."""
    size, vocabulary = theirs["lm_head.weight"].shape[0], config["vocab_size"]
    if config.get("draft_vocab_size", size) != size:
        raise InputError(
            f"EAGLE-3: draft_vocab_size is {config['draft_vocab_size']}, but lm_head.weight has {size} rows: "
            "config and tensors are not of one checkpoint"
        )
    if size == vocabulary:
        if "d2t" in theirs and bool(theirs["d2t"].any()):
            raise InputError("EAGLE-3 checkpoint: a full draft vocabulary with non-zero d2t offsets; d2t is damaged")
        return {}
    if "d2t" not in theirs:
        raise InputError(
            f"EAGLE-3 checkpoint: {size} draft tokens of {vocabulary} but no d2t table, expected offsets to the "
            "target's ids; fetch the checkpoint again"
        )
    d2t = theirs["d2t"].long()
    ids = d2t + torch.arange(len(d2t))
    if len(d2t) != size or not (bool((ids >= 0).all()) and bool((ids < vocabulary).all())):
        raise InputError(
            f"EAGLE-3 checkpoint: d2t ({len(d2t)} entries) leads outside the {vocabulary} target ids, expected {size} "
            "offsets (target id - draft id), not absolute ids"
        )
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": d2t, "t2d": theirs.get("t2d", t2d)}


def _native_config(config: dict[str, Any], theirs: dict[str, Tensor], layers: list[int]) -> NativeConfig:
    own = config.get("specheads", {})
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    try:
        inverse_frequencies(2, 1.0, scaling)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"EAGLE-3 checkpoint: rope parameters {scaling} are not usable here ({error}), expected rope_type default, "
            "linear or llama3 with all its numbers; use another draft"
        ) from error
    head_config = {
        **own.get("head_config", {}),
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "rope_scaling": None if plain else scaling,
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": theirs["lm_head.weight"].shape[0],
        "layer_ids": layers,
        "feature_norm": "fc_norm.0.weight" in theirs,
    }
    facts = own.get("target") or {
        "name": config.get("base_model_name_or_path"),
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "context_limit": config.get("max_position_embeddings"),
    }
    return native_skeleton("eagle3", head_config, facts, layers, theirs["fc.weight"].dtype)


def _layers(config: dict[str, Any], target: TargetConfig | None) -> list[int]:
    nested = config.get("eagle_config") or {}
    layers = config.get("eagle_aux_hidden_state_layer_ids", nested.get("eagle_aux_hidden_state_layer_ids"))
    if layers is not None:
        return [int(layer) for layer in layers]
    if target is None:
        raise InputError(
            "EAGLE-3 checkpoint: config.json has no eagle_aux_hidden_state_layer_ids, and the layers it reads depend "
            "on the target's depth; name the target"
        )
    layers = [2, target.num_layers // 2, target.num_layers - 3]
    warnings.warn(f"EAGLE-3 checkpoint without feature layers: the published {layers} are taken", stacklevel=2)
    return layers
