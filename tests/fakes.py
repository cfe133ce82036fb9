"""Tiny random models and tokenizers made in memory: the targets of the unit tests.

Weights are drawn with a wide range (0.5) so that argmaxes are not flat, in fp32, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specheads.target.adapter import StockTarget, Target
from specheads.target.load import wrap_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2  # <|im_end|> in both tokenizers, as in SmolLM2


def tiny_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal LM of family ``kind`` (see ``FAMILIES``); ``overrides`` are configuration keys."""
    config_class, settings = FAMILIES[kind]
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, config_class)(**{**sizes, **settings, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms away from 1 and biases away from 0, so that a forgotten one is seen
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight")
            if norm or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().requires_grad_(False)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Llama family: these take the lean path
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    # served by the stock path
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral_window": ("MistralConfig", {"sliding_window": 24}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 24, "query_pre_attn_scalar": 8}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "olmo2": ("Olmo2Config", {}),
    # not servable: alibi, recurrent, hybrid
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "mamba2": (
        "Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [1]}),
}
LEAN_FAMILIES = ("llama", "llama_tied", "llama3", "llama_bias", "qwen2", "mistral")
STOCK_FAMILIES = ("qwen3", "mistral_window", "gpt2", "mixtral", "gemma2", "cohere", "granite", "olmo2")
REFUSED_FAMILIES = ("bloom", "mamba2", "lfm2")


def tiny_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Random Llama: vocabulary 64, hidden 32, 3 layers, 4 heads over 2 key-value heads, fp32."""
    return tiny_model("llama", seed, **overrides)


def tiny_tokenizer(vocab_size: int = 64, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Word-level tokenizer of ``vocab_size`` ids: three specials, an unknown, then roles, letters and ``w<i>``."""
    words = [*SPECIALS, "<unk>", "system", "user", "assistant", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"w{index}" for index in range(len(words), vocab_size)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words[:vocab_size])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return _wrap(tokenizer, template)


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: three specials and the 256 bytes (259 ids); any text comes back exactly."""
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return _wrap(tokenizer, template)


def _wrap(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    names = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "pad_token": SPECIALS[2]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    fast.chat_template = template
    return fast


def tiny_target(
    kind: str = "llama", seed: int = 0, *, lean: str = "auto", bytes_tokenizer: bool = False, **overrides: Any
) -> Target:
    """A target straight from a random model and a tokenizer, without disk. ``lean``: "auto" or "off"."""
    if bytes_tokenizer:
        overrides.setdefault("vocab_size", 259)
    model = tiny_model(kind, seed, **overrides)
    tokenizer = byte_tokenizer() if bytes_tokenizer else tiny_tokenizer(int(model.config.vocab_size))
    return wrap_model(model, tokenizer, name=f"tiny-{kind}-{seed}", lean=lean)


def stock_target(kind: str = "llama", seed: int = 0, **overrides: Any) -> StockTarget:
    """``tiny_target`` on the stock path."""
    target = tiny_target(kind, seed, lean="off", **overrides)
    assert isinstance(target, StockTarget)
    return target


def save_tiny_folder(
    folder: Path,
    kind: str = "llama",
    seed: int = 0,
    *,
    tokenizer: Callable[[], PreTrainedTokenizerFast] | None = None,
    **overrides: Any,
) -> Path:
    """The tiny model and its tokenizer as an ordinary Hugging Face folder; returns ``folder``."""
    model = tiny_model(kind, seed, **overrides)
    model.save_pretrained(folder)
    (tokenizer() if tokenizer else tiny_tokenizer(int(model.config.vocab_size))).save_pretrained(folder)
    return folder
