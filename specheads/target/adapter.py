"""The frozen target: logits and features of any Hugging Face causal LM over the project's own cache.

Legend: B rows, N new tokens, T keys (cached and new), H hidden size, V vocabulary, F = H x captured layers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from specheads.hardware import dtype_name
from specheads.modules.kv_cache import KVCache
from specheads.target import mask as masks
from specheads.target.cache import CACHE_ARGUMENT, CacheFacade
from specheads.target.facts import final_norm
from specheads.types import DecodeStats, FrozenParts, GenerationOutput, SamplingParams, TargetConfig, TargetOutput
from specheads.utils import InputError

_raw_last_state: ContextVar[list[Tensor] | None] = ContextVar("raw_last_state", default=None)


class Target(ABC):
    """A frozen causal LM. ``forward`` serves tree decoding and feature extraction, ``generate`` is the stock model's.

    Made by ``specheads.target.load``; nothing of it is ever trained.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, config: TargetConfig, parts: FrozenParts, dtype_reason: str
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.parts = parts
        self.dtype_reason = dtype_reason
        self.note = ""  # why this class serves the model, filled in by the loader

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.parts.output_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.parts.output_weight.device

    def describe(self) -> str:
        """One line: the path that serves this model and why, the dtype and why."""
        note = f" ({self.note})" if self.note else ""
        return (
            f"{self.config.name}: {type(self).__name__}{note} over {type(self.model).__name__} "
            f"on {self.device}, {dtype_name(self.dtype)}: {self.dtype_reason}"
        )

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for ``rows`` sequences of up to ``capacity`` columns (committed ones and one tree)."""
        config = self.config
        return KVCache(config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim, self.dtype, self.device)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        tree_mask: Tensor | None = None,
        layer_ids: Sequence[int] = (),
        logits: str | Tensor = "all",
    ) -> TargetOutput:
        """One forward over N new tokens a row.

        Args:
            tokens: B N int64.
            positions: B N int64; default: the row's committed length + 0..N-1.
            cache: new keys and values are written behind its committed columns, nothing is committed. None: a plain
                causal forward that keeps nothing (rows padded on the right need no mask: padding comes later).
            tree_mask: B N N bool, [b, i, j] = node i sees node j (``DraftTree.ancestors``); None: causal.
            layer_ids: features to return, as in ``FeatureSpec``: id i enters layer i, id L is the raw last state.
            logits: "all" -> B N V; "none" -> None; a Tensor B of one position a row -> B 1 V.

        Raises:
            ValueError: the cache is full, or the target's context limit is behind.
        """
        # features of a forward without a cache may enter a loss later, which tensors of inference mode cannot
        with torch.no_grad() if cache is None else torch.inference_mode():
            states, last = self._run(tokens, positions, cache, tree_mask, layer_ids)
            features = torch.cat(states, dim=-1) if states else None
            return TargetOutput(pick_logits(last, logits, self._output), features)

    @abstractmethod
    def _run(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        tree_mask: Tensor | None,
        layer_ids: Sequence[int],
    ) -> tuple[list[Tensor], Tensor]:
        """The layers. Returns the states B N H of ``layer_ids`` in their order, and what ``_output`` reads (B N H)."""

    @abstractmethod
    def _output(self, last: Tensor) -> Tensor:
        """What ``_run`` returned last [..., H] -> logits [..., V]."""

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> GenerationOutput:
        """The stock model's own ``transformers`` generate: the reference, and the baseline called "HF generate".

        Prompts are batched with left padding. A row stops at an EOS (kept as its last id), after ``max_new_tokens``,
        or at the context limit. ``eos_ids``: None = the target's own, () = never stop at one.

        Raises:
            InputError: an empty prompt, or one that leaves no room for a token.
        """
        start = time.perf_counter()
        sampling = sampling or SamplingParams()
        stops = tuple(self.config.eos_ids if eos_ids is None else eos_ids)
        # rows near the context limit get fewer tokens; rows of one allowance make one batch
        groups: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            allowed = min(max_new_tokens, self.config.context_limit - len(prompt))
            if not prompt or allowed < 1:
                raise InputError(
                    f"prompt {row}: got {len(prompt)} tokens and max_new_tokens={max_new_tokens}, expected 1 to "
                    f"{self.config.context_limit - 1} tokens and room for one more; shorten the prompt"
                )
            groups.setdefault(allowed, []).append(row)
        tokens: list[list[int]] = [[] for _ in prompts]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if sampling.seed is None:
                torch.seed()  # the state that the fork puts back would give the same text in every call
            else:
                torch.manual_seed(sampling.seed)
            for allowed, rows in groups.items():
                batch = [list(prompts[row]) for row in rows]
                for row, ids in zip(rows, self._generate_batch(batch, allowed, sampling, stops), strict=True):
                    tokens[row] = ids
        finish = ["stop" if ids[-1] in stops else "length" for ids in tokens]
        steps = [len(ids) - 1 for ids in tokens]
        stats = DecodeStats(target_forwards=steps, emitted=list(steps))
        return GenerationOutput(tokens, finish, stats, time.perf_counter() - start)

    def _generate_batch(
        self, prompts: list[list[int]], new_tokens: int, sampling: SamplingParams, stops: tuple[int, ...]
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        pad = stops[0] if stops else 0
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        greedy = sampling.temperature == 0
        settings = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=not greedy,
            temperature=None if greedy else sampling.temperature,
            top_k=None if greedy else sampling.top_k,
            top_p=None if greedy else sampling.top_p,
            eos_token_id=list(stops) or None,
            pad_token_id=pad,
        )
        # the model's own sampling defaults would fill what is left open here
        defaults, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            out = self.model.generate(ids, attention_mask=seen.to(self.device), generation_config=settings)  # type: ignore[operator]
        finally:
            self.model.generation_config = defaults
        rows = []
        for new in out[:, longest:].tolist():
            end = next((place + 1 for place, token in enumerate(new) if token in stops), len(new))
            rows.append(new[:end])
        return rows


def pick_logits(hidden: Tensor, logits: str | Tensor, head: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The logits that a forward was asked for (see ``Target.forward``). hidden: B N H, what ``head`` reads."""
    if isinstance(logits, str):
        if logits not in ("all", "none"):
            raise ValueError(f"logits: got {logits!r}, expected 'all', 'none' or a tensor of positions")
        return head(hidden) if logits == "all" else None
    return head(hidden.gather(1, logits[:, None, None].expand(-1, 1, hidden.shape[-1])))  # B 1 V


class StockTarget(Target):
    """Any Hugging Face causal LM with plain attention: its own modules, our cache, an additive 4-D mask."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, config: TargetConfig, parts: FrozenParts, dtype_reason: str
    ) -> None:
        super().__init__(model, tokenizer, config, parts, dtype_reason)
        self._decoder: nn.Module = model.get_decoder()
        final_norm(model).register_forward_pre_hook(_keep_raw_state)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        tree_mask: Tensor | None,
        layer_ids: Sequence[int],
    ) -> tuple[list[Tensor], Tensor]:
        layers = self.config.num_layers
        inputs = self._inputs(tokens, positions, cache, tree_mask)
        inner = sorted({layer for layer in layer_ids if layer < layers})
        captured: list[Tensor] = []
        token = _raw_last_state.set(captured)
        try:
            out = self._decoder(input_ids=tokens, output_hidden_states=inner or False, **inputs)
        finally:
            _raw_last_state.reset(token)
        states = [captured[-1] if layer == layers else out.hidden_states[layer] for layer in layer_ids]
        return states, out.last_hidden_state

    def _output(self, last: Tensor) -> Tensor:
        return self.parts.lm_head(last)

    def _inputs(
        self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None, tree_mask: Tensor | None
    ) -> dict[str, Any]:
        """Mask, positions and cache as the decoder's keyword arguments."""
        rows, nodes = tokens.shape
        if cache is None:
            plain = tree_mask is None and positions is None
            if positions is None:
                positions = torch.arange(nodes, device=tokens.device).expand(rows, nodes)
            # without a mask of ours the model makes its causal one, which has the fastest kernels
            new = masks.causal(rows, nodes, tokens.device) if tree_mask is None else tree_mask
            mask = None if plain else masks.additive(new, self.dtype)
            return {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        check_room(cache, nodes, self.config.context_limit)
        if positions is None:
            positions = cache.lengths[:, None] + torch.arange(nodes, device=tokens.device)
        new = masks.causal(rows, nodes, tokens.device) if tree_mask is None else tree_mask
        mask = masks.additive(cache.visible(new), self.dtype)
        return {
            "attention_mask": mask,
            "position_ids": positions,
            CACHE_ARGUMENT: CacheFacade(cache),
            "use_cache": True,
        }


def check_room(cache: KVCache, nodes: int, context_limit: int) -> None:
    """Raise ``ValueError`` before anything is written when a forward would not fit."""
    if cache.width + nodes > cache.capacity:
        raise ValueError(f"cache of {cache.capacity} columns cannot take {nodes} after {cache.width}")
    if cache.width >= context_limit:
        raise ValueError(f"the target's context limit of {context_limit} positions is reached")


def _keep_raw_state(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-hook of the final norm: keep its input when this forward asked for it (other threads see their own)."""
    captured = _raw_last_state.get()
    if captured is not None:
        captured.append(args[0])
