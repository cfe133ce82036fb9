"""The fast path of Llama-family targets: the stock model's own weights, fused and packed, without its overhead.

The arithmetic is the stock model's, operation by operation and rounding by rounding; what is saved is the repeated
reordering of weights on a CPU, the copies of keys and values for grouped queries and of the whole cache, and some
two thirds of the operator calls. The loader proves it equal to the stock forward before it is used.

Legend: B rows, N new tokens, T keys (cached and new), H hidden size, d head size, V vocabulary,
F = H x captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specheads.modules.decoder_layer import CachedLayer, LayerShape, Product, attend, fold_groups
from specheads.modules.kv_cache import KVCache
from specheads.modules.norm import normed
from specheads.modules.packed_linear import pack_linear
from specheads.modules.rotary import signed
from specheads.target import mask as masks
from specheads.target.adapter import Target, check_room
from specheads.types import FrozenParts, TargetConfig

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
PACK_LIMIT = 2 * 1024**3  # bytes of weights that are held a second time, packed
PACKED_ROWS = 16


class LeanLayer(NamedTuple):
    """One decoder layer of the target."""

    input_norm: Tensor  # H
    run: CachedLayer


class Attention(NamedTuple):
    """What all layers of one forward share."""

    cos: Tensor  # B N 1 d
    sin: Tensor  # B N 1 d, signed
    folded_mask: Tensor | None  # B 1 (groups N) T, additive; None: every key is seen
    causal: bool  # plain causal over the new tokens alone, no mask needed
    cache: KVCache | None


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why a model cannot take the lean path, in a few words; None if it can be tried."""
    config = model.config
    name = type(model).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act}"
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds != {"full_attention"} or windowed:
        return "sliding window"
    rope = str((config.rope_parameters or {}).get("rope_type", "default"))
    if rope not in ROPE_TYPES:
        return f"rope type {rope}"
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if any(type(module) is not nn.Linear for module in linears):
        return "linear layers of a quantised or adapted kind"
    return None


class LeanTarget(Target):
    """A Llama-family target over fused and (on a CPU, for small models) packed weights.

    The stock model stays for ``generate``; its projections become views of the fused weights, so nothing but the
    packed copy takes memory twice.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: TargetConfig,
        parts: FrozenParts,
        dtype_reason: str,
        pack: bool = True,
    ) -> None:
        super().__init__(model, tokenizer, config, parts, dtype_reason)
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        self.packed = pack and self.device.type == "cpu" and size <= PACK_LIMIT
        decoder: Any = model.get_decoder()
        self._eps = float(model.config.rms_norm_eps)
        self._shape = LayerShape(
            config.hidden_size,
            int(model.config.intermediate_size),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._eps,
        )
        with torch.no_grad():
            self._layers = [self._fuse(layer) for layer in decoder.layers]
            projection: Any = model.get_output_embeddings()
            self._head = self._product(projection.weight, projection.bias)
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._rotary: nn.Module = decoder.rotary_emb
        self._norm_weight: Tensor = decoder.norm.weight
        self._scale = float(decoder.layers[0].self_attn.scaling)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Product:
        if self.packed:
            return pack_linear(weight.detach(), PACKED_ROWS, bias)
        return lambda x: F.linear(x, weight, bias)

    def _fuse(self, layer: Any) -> LeanLayer:
        attention, mlp = layer.self_attn, layer.mlp
        products = CachedLayer(
            self._shape,
            self._product(*_join(attention.q_proj, attention.k_proj, attention.v_proj)),
            self._product(attention.o_proj.weight, attention.o_proj.bias),
            self._product(*_join(mlp.gate_proj, mlp.up_proj)),
            self._product(mlp.down_proj.weight, mlp.down_proj.bias),
            layer.post_attention_layernorm.weight,
        )
        return LeanLayer(layer.input_layernorm.weight, products)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        tree_mask: Tensor | None,
        layer_ids: Sequence[int],
    ) -> tuple[list[Tensor], Tensor]:
        hidden = F.embedding(tokens, self._embedding)  # B N H
        shared = self._attention(hidden, positions, cache, tree_mask)
        wanted = set(layer_ids)
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in wanted:
                captured[index] = hidden
            hidden = self._run_layer(index, layer, hidden, shared)
        captured[len(self._layers)] = hidden
        return [captured[layer] for layer in layer_ids], hidden

    def _output(self, last: Tensor) -> Tensor:
        return self._head(normed(last, self._eps, self._norm_weight))

    def _attention(
        self, hidden: Tensor, positions: Tensor | None, cache: KVCache | None, tree_mask: Tensor | None
    ) -> Attention:
        """Angles and mask, made once a forward."""
        rows, nodes, device = hidden.shape[0], hidden.shape[1], hidden.device
        width = 0
        if cache is not None:
            check_room(cache, nodes, self.config.context_limit)
            width = cache.width
        if positions is None:
            positions = torch.arange(nodes, device=device)[None]
            positions = positions if cache is None else cache.lengths[:, None] + positions
        cos, sin = self._rotary(hidden, positions)  # B N d, or 1 N d
        causal = tree_mask is None and width == 0 and nodes > 1
        folded = None
        # the single new token of a lone row sees every column; other steps need to be told
        if not causal and not (rows == 1 and nodes == 1):
            new = masks.causal(rows, nodes, device) if tree_mask is None else tree_mask
            visible = new if cache is None else cache.visible(new)
            groups = self.config.num_heads // self.config.num_kv_heads
            folded = fold_groups(masks.additive(visible, hidden.dtype)[:, 0], groups)
        return Attention(cos[:, :, None], signed(sin)[:, :, None], folded, causal, cache)

    def _run_layer(self, index: int, layer: LeanLayer, hidden: Tensor, shared: Attention) -> Tensor:
        """B N H -> B N H: hidden + attention + MLP."""
        normal = normed(hidden, self._eps, layer.input_norm)
        queries, new_keys, new_values = layer.run.project(normal, shared.cos, shared.sin)
        keys, values = new_keys, new_values
        if shared.cache is not None:
            keys, values = shared.cache.write(index, new_keys, new_values)
        if shared.folded_mask is not None:
            return layer.run.finish(hidden, attend(queries, keys, values, shared.folded_mask, self._scale))
        if shared.causal:  # the new tokens are all there is; as a view into the cache they would read slower
            keys, values = new_keys, new_values
        grouped = self.config.num_heads != self.config.num_kv_heads
        attended = F.scaled_dot_product_attention(  # the call that the stock model makes here, for the same bits
            queries, keys, values, is_causal=shared.causal, scale=self._scale, enable_gqa=grouped
        )
        return layer.run.finish(hidden, attended)


def _join(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight and bias over several projections of the same input; the projections become views of it."""
    weight = torch.cat([linear.weight for linear in linears])
    sizes = [linear.out_features for linear in linears]
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight.data = part
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias for linear in linears])
