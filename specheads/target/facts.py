"""What is read off a stock model: its final norm, the frozen parts, the sizes, the stop ids, the fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specheads.target.cache import CACHE_ARGUMENT
from specheads.types import FrozenParts, TargetConfig
from specheads.utils import InputError

NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "ln_out")
SAMPLES = 64  # numbers of each parameter that enter the fingerprint


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the output projection.

    Raises:
        InputError: none is found under a usual name.
    """
    decoder = model.get_decoder()
    for name in NORM_NAMES:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise InputError(
        f"target: {type(model).__name__} has no final norm under a known name, expected one of "
        f"{', '.join(NORM_NAMES)}; choose another target"
    )


class ScaledEmbedding(nn.Module):
    """The target's embedding times the constant that its own forward applies."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H]."""
        return self.embedding(ids) * self.scale


def frozen_parts(model: PreTrainedModel) -> FrozenParts:
    """Embedding (scaled as the target scales it), output projection (with scale and soft-cap), final norm.

    Whether they compose to the model's own logits is checked by ``specheads.target.check``.
    """
    embedding: Any = model.get_input_embeddings()
    projection: Any = model.get_output_embeddings()
    if embedding is None or projection is None:
        raise InputError(f"target: {type(model).__name__} has no output projection; name a causal language model")
    scale = _embedding_scale(model, embedding)
    embed = embedding if scale == 1.0 else ScaledEmbedding(embedding, scale)
    return FrozenParts(embed, output_head(model.config, projection), final_norm(model), projection.weight.detach())


def output_head(config: Any, projection: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``projection`` followed by what the configuration says of logits: a factor (Cohere), a divisor (Granite), a
    soft-cap (Gemma 2)."""
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    if factor == 1.0 and not cap:
        return projection

    def head(hidden: Tensor) -> Tensor:
        logits = projection(hidden) * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return head


@torch.no_grad()
def _embedding_scale(model: PreTrainedModel, embedding: Any) -> float:
    """The constant between the embedding's rows and what enters the first layer (1 where positions are added)."""
    ids = torch.tensor([[3, 5, 7, 11]], device=embedding.weight.device) % embedding.weight.shape[0]
    entering = model.get_decoder()(input_ids=ids, output_hidden_states=[0], use_cache=False).hidden_states[0].float()
    plain = embedding(ids).float()
    size = plain.shape[-1]
    for scale in (1.0, float(getattr(model.config, "embedding_multiplier", None) or 1.0), size**0.5):
        if entering.shape == plain.shape and torch.allclose(entering, plain * scale, rtol=2e-2, atol=1e-6):
            return scale
    return 1.0


def target_config(model: PreTrainedModel, tokenizer: Any, name: str) -> TargetConfig:
    """The facts of a model, its cache measured rather than guessed.

    Raises:
        InputError: the cache is not one key and one value tensor of equal shape in every layer.
    """
    config = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    kv_heads, head_dim = _cache_shape(model, config)
    rope = _rope(config)
    facts: dict[str, Any] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": embedding.weight.shape[0],
        "context_limit": context_limit(config),
        "rms_norm_eps": _first(config, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), 1e-5),
        "rope_theta": float(rope.pop("rope_theta", 10_000.0)),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
    }
    return TargetConfig(name=name, eos_ids=_eos_ids(model, tokenizer), fingerprint=fingerprint(facts, model), **facts)


def context_limit(config: Any) -> int:
    """Positions the target was made for; inside a sliding window, where every mask is still the plain one."""
    positions = int(_first(config, ("max_position_embeddings", "n_positions", "max_sequence_length"), 2048))
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    slides = any("sliding" in kind or "chunked" in kind for kind in kinds) if kinds else bool(window)
    if not slides:
        return positions
    return min(positions, int(window or getattr(config, "attention_chunk_size", None) or positions))


def _first(config: Any, names: tuple[str, ...], default: float) -> Any:
    """The first of the attributes that is there and not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _rope(config: Any) -> dict[str, Any]:
    """Rope parameters with plain values; of models with two kinds of layer, those of full attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) or {}
    return {key: value for key, value in dict(rope).items() if value is not None}


@torch.no_grad()
def _cache_shape(model: PreTrainedModel, config: Any) -> tuple[int, int]:
    """Key-value heads and head size, from the model's own cache after two tokens."""
    cache = DynamicCache(config=config)
    ids = torch.tensor([[0, 1]], device=model.device)
    model.get_decoder()(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    shapes = {
        tuple(tensor.shape)
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    }
    if len(shapes) != 1 or len(cache.layers) != config.num_hidden_layers:
        raise InputError(
            f"target: {config.model_type} keeps {len(cache.layers)} cached layers of shapes {sorted(shapes)}, expected "
            f"{config.num_hidden_layers} of one shape for keys and values; choose another target"
        )
    shape = shapes.pop()
    return shape[1], shape[3]


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a text for this model: generation config, config and tokenizer together."""
    found: set[int] = set()
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer)
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found |= set(value) if isinstance(value, (list, tuple)) else {value} if value is not None else set()
    return tuple(sorted(int(value) for value in found))


def fingerprint(facts: dict[str, Any], model: nn.Module) -> str:
    """sha256 prefix over the facts and evenly spaced numbers of every parameter.

    Numbers are taken in bf16, so the same weights loaded in fp32 or bf16 are the same target.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // SAMPLES)
        sample = flat[::step][: SAMPLES + 1].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
