"""The published Medusa layouts.

| layout              | tensors                                                                          |
|---------------------|----------------------------------------------------------------------------------|
| v1 (written, read)  | ``{h}.{l}.linear.weight/bias`` of residual block l, ``{h}.{blocks}.weight`` [V, H] |
| v2 (read)           | the residual blocks only; the output rows are the target's                       |

Written as v1, in ``.safetensors`` (TGI, vLLM, TensorRT-LLM) and ``.pt`` (the reference). The config holds no
``architectures``, ``model_type`` or base-model ``num_*`` key: each breaks an engine (TGI, vLLM). v1 holds whole output
matrices, and engines load no reduced draft vocabulary for Medusa, so the export makes one for every head: the head's
own rows for the ids of its draft vocabulary, the target's rows (which the head's own started from) for all others.
With the shared layout each head gets a copy of the target's rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specheads.checkpoints.io import key_faults
from specheads.checkpoints.native import NativeConfig, native_skeleton
from specheads.types import TargetConfig
from specheads.utils import InputError

NAME = "medusa"
HEADS = ("medusa",)
READERS = "specheads, vLLM (name the method: `medusa`), TGI, TensorRT-LLM, the reference (exactly 5 heads)"
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

BLOCK = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
OUTPUT = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")


def native_block(head: int, block: int, kind: str) -> str:
    """Native name of a residual block's weight or bias."""
    return f"blocks.{head}.{block}.linear.{kind}"


def native_output(head: int) -> str:
    """Native name of a head's output rows."""
    return f"lm_heads.{head}.weight"


def matches(config: dict[str, Any], keys: Iterable[str]) -> bool:
    """By keys: numbered heads of numbered residual blocks."""
    return any(BLOCK.fullmatch(key) for key in keys)


def from_native(
    config: NativeConfig, tensors: dict[str, Tensor], output_weight: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors) of layout v1. ``output_weight``: the target's output rows (V H).

    Raises:
        InputError: the head is of another kind, or the target's rows are needed and not given.
    """
    if config["head"] not in HEADS:
        raise InputError(f"export: format {NAME} holds {', '.join(HEADS)} heads, got {config['head']}; choose another")
    head = config["head_config"]
    heads, blocks = head["num_heads"], head["num_blocks"]
    out: dict[str, Tensor] = {}
    for index in range(heads):
        for block in range(blocks):
            for kind in ("weight", "bias"):
                out[f"{index}.{block}.linear.{kind}"] = tensors[native_block(index, block, kind)]
        out[f"{index}.{blocks}.weight"] = _whole_rows(config, tensors, index, output_weight)
    written = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "medusa_fc_bias": True,  # vLLM drops the biases without a word otherwise
        "hidden_size": head["hidden_size"],
        "vocab_size": config["target"]["vocab_size"],
        "base_model_name_or_path": config["target"]["name"],
        "torch_dtype": str(out["0.0.linear.weight"].dtype).removeprefix("torch."),
        "specheads": {"head_config": head, "target": config["target"]},
    }
    return written, out


def _whole_rows(config: NativeConfig, tensors: dict[str, Tensor], head: int, output_weight: Tensor | None) -> Tensor:
    """Output rows of one head over the whole vocabulary (V H)."""
    rows = tensors.get(native_output(head))
    if rows is not None and rows.shape[0] == config["target"]["vocab_size"]:
        return rows
    if output_weight is None:
        raise InputError(f"export: format {NAME} needs the target's output rows for this head; load the target as well")
    if rows is None:
        return output_weight
    whole = output_weight.to(rows.dtype).clone()
    whole[tensors["d2t"] + torch.arange(len(rows))] = rows
    return whole


def to_native(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetConfig | None = None
) -> tuple[NativeConfig, dict[str, Tensor]]:
    """(native config, native tensors) of v1 (own output rows) or v2 (the target's); an exported draft vocabulary comes
    back as the whole one.

    Raises:
        InputError: tensors are missing or left over, or do not fit the config's counts.
    """
    blocks = {key: match for key in tensors if (match := BLOCK.fullmatch(key))}
    outputs = {key: match for key in tensors if (match := OUTPUT.fullmatch(key))}
    heads = 1 + max(int(match[1]) for match in blocks.values())
    depth = 1 + max(int(match[2]) for match in blocks.values())
    for field, found in (("medusa_num_heads", heads), ("medusa_num_layers", depth)):
        if config.get(field, found) != found:
            raise InputError(f"Medusa checkpoint: {field} is {config[field]}, but the tensors are those of {found}")
    native = {native_block(int(m[1]), int(m[2]), m[3]): tensors[key] for key, m in blocks.items()}
    rows = {native_output(int(m[1])): tensors[key] for key, m in outputs.items() if int(m[2]) == depth}
    wanted = {native_block(h, b, kind) for h in range(heads) for b in range(depth) for kind in ("weight", "bias")}
    wanted |= {native_output(h) for h in range(heads)} if outputs else set()
    missing = wanted - native.keys() - rows.keys()
    odd = [key for key in tensors if key not in blocks and (key not in outputs or int(outputs[key][2]) != depth)]
    if odd or missing:
        raise InputError(f"Medusa checkpoint: {key_faults(missing, odd)}; fetch or export it again")
    shared = not outputs or _was_shared(config, list(rows.values()))
    if not shared:
        native |= rows
    return _native_config(config, native, heads, depth, shared, target), native


def _was_shared(config: dict[str, Any], outputs: list[Tensor]) -> bool:
    """Whether an export of a shared-layout head is at hand: its equal copies of the target's rows are not weights."""
    said = config.get("specheads", {}).get("head_config", {}).get("layout") == "shared"
    if said and not all(torch.equal(outputs[0], other) for other in outputs[1:]):
        raise InputError("Medusa checkpoint: layout is shared, but the heads' output rows differ; the file is damaged")
    return said


def _native_config(
    config: dict[str, Any],
    native: dict[str, Tensor],
    heads: int,
    depth: int,
    shared: bool,
    target: TargetConfig | None,
) -> NativeConfig:
    own = config.get("specheads", {})
    first = native[native_block(0, 0, "weight")]
    vocabulary = config.get("vocab_size") if shared else native[native_output(0)].shape[0]
    layers = own.get("head_config", {}).get("num_layers")
    if target is not None:
        vocabulary, layers = vocabulary or target.vocab_size, layers or target.num_layers
    if vocabulary is None or layers is None:
        lost = "vocab_size" if vocabulary is None else "layer count"
        raise InputError(f"Medusa checkpoint: nothing in it tells the target's {lost}; name the target")
    head_config = {
        **own.get("head_config", {}),
        "num_layers": layers,
        "num_heads": heads,
        "num_blocks": depth,
        "layout": "shared" if shared else "own",
        "hidden_size": first.shape[0],
        "vocab_size": vocabulary,
        "draft_vocab_size": None,
    }
    facts = own.get("target") or {
        "name": config.get("base_model_name_or_path"),
        "hidden_size": first.shape[0],
        "vocab_size": vocabulary,
    }
    return native_skeleton("medusa", head_config, facts, [layers], first.dtype)
