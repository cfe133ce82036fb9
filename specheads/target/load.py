"""From a name to a frozen target: the embedded default, a hub id, or a folder; what cannot be served is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from specheads.hardware import choose_dtype
from specheads.target import smollm2
from specheads.target.adapter import StockTarget, Target
from specheads.target.check import TOLERANCE, check_target, lean_distance
from specheads.target.facts import frozen_parts, target_config
from specheads.target.lean import LeanTarget, unsupported_reason
from specheads.utils import InputError

# positions enter the scores as a bias over columns, which a tree does not keep
ALIBI = ("bloom", "mpt")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
BROKEN_FILE = (SafetensorError, pickle.UnpicklingError, EOFError)
LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, *BROKEN_FILE)


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    lean: str = "auto",
    pack: bool = True,
) -> Target:
    """A frozen target, checked before it is handed out.

    Args:
        name: ``smollm2-135m`` (embedded), a hub id, or a folder in the Hugging Face layout.
        dtype: "auto" (measured, see ``hardware.choose_dtype``), "fp32", "bf16", or a torch dtype.
        device: see ``find_device``.
        revision: of a hub id.
        trust_remote_code: run modelling code that comes with the model. Off unless asked for.
        lean: "auto" uses the fast path where it equals the stock forward, "off" never.
        pack: reorder weights for the CPU's kernels (twice the memory; only small models, only CPU).

    Raises:
        InputError: a device that is not there, unknown id or no network, folder without configuration or weights,
            broken weights, an architecture that is unknown or cannot be served under a tree mask.
    """
    if lean not in ("auto", "off"):
        raise InputError(f"lean: got {lean!r}, expected auto or off; choose one of these")
    device = find_device(device)
    chosen, reason = dtype, "as asked"
    if isinstance(chosen, str):
        choice = choose_dtype(chosen, device)
        chosen, reason = choice.dtype, choice.reason
    place = _place(name)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _QuietProgress():
        try:
            config = AutoConfig.from_pretrained(place, **options)
            _refuse(config, name)
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            model = _load_model(place, name, chosen, options)
        except InputError:
            raise
        except LOAD_ERRORS as error:
            raise _load_error(name, place, error) from error
    model.to(device)  # type: ignore[arg-type]
    return wrap_model(model, tokenizer, name=name, lean=lean, pack=pack, dtype_reason=reason)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    lean: str = "auto",
    pack: bool = True,
    dtype_reason: str = "as asked",
) -> Target:
    """A checked target over a model that is already in memory; see ``load_target``. The model is frozen."""
    _refuse(model.config, name)
    model.eval().requires_grad_(False)
    config, parts = target_config(model, tokenizer, name), frozen_parts(model)
    stock = StockTarget(model, tokenizer, config, parts, dtype_reason)
    check_target(stock)
    if lean == "off":
        stock.note = "lean path off"
        return stock
    reason = unsupported_reason(model)
    if reason is not None:
        stock.note = f"no lean path: {reason}"
        return stock
    fast = LeanTarget(model, tokenizer, config, parts, dtype_reason, pack=pack)
    gap, allowed = lean_distance(fast, stock), TOLERANCE.get(stock.dtype, 1e-3)
    if gap > allowed:
        stock.note = f"lean path differs by {gap:.2g}, allowed {allowed:g}"
        return stock
    fast.note = f"equal to the stock forward to {gap:.1g}"
    return fast


def find_device(device: str | torch.device) -> torch.device:
    """The device by its name, tried once; "auto" takes the GPU if there is one.

    Raises:
        InputError: it cannot be used here.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        why = next(iter(str(error).splitlines()), type(error).__name__).split(". ")[0][:120]
        raise InputError(
            f"target.device: got {name!r}, which cannot be used here ({why}); expected auto, cpu, or a GPU of this "
            "machine such as cuda:0; leave it at auto to take what is there"
        ) from error
    return torch.device(name)


def _place(name: str) -> str:
    """The folder or hub id behind a name; a folder must hold a configuration and weights."""
    if name == smollm2.NAME:
        return str(smollm2.embedded_folder())
    folder = Path(name).expanduser()
    if not folder.exists():
        looks_like_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or not name
        if looks_like_path:
            raise InputError(
                f"target: no folder {name!r}; expected {smollm2.NAME}, a hub id or a folder with config and weights"
            )
        return name
    if not (folder / "config.json").is_file():
        raise InputError(f"target: {name} has no config.json; expected a folder in the Hugging Face layout")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise InputError(f"target: {name} holds no weights (*.safetensors); copy the model's weights into it")
    return str(folder)


def _refuse(config: Any, name: str) -> None:
    """Raise for the architectures that a tree mask cannot steer, before any weight is read."""
    config = config.get_text_config()
    kind = getattr(config, "model_type", "?")
    problem = None
    if getattr(config, "is_encoder_decoder", False):
        problem = "is an encoder-decoder model"
    elif kind in ALIBI or getattr(config, "alibi", False):
        problem = "puts positions into the scores (alibi), which a draft tree cannot follow"
    elif any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers):
        problem = "keeps a recurrent state, which a draft tree cannot branch"
    if problem is not None:
        raise InputError(f"target: {name} ({kind}) {problem}; choose a target with plain attention")


def _load_model(place: str, name: str, dtype: torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
    """The stock model with every weight found; sdpa where the architecture has it, else eager."""
    arguments: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, **options}
    read: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = read(place, attn_implementation="sdpa", **arguments)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model, info = read(place, attn_implementation="eager", **arguments)
    missing = sorted(info["missing_keys"]) + sorted(str(entry) for entry in info.get("mismatched_keys", ()))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"target: the weights of {name} lack {missing[0]}{more}, which the configuration asks for; "
            "complete the weights or correct config.json (tie_word_embeddings?)"
        )
    if getattr(model, "_is_stateful", False):
        raise InputError(f"target: {name} keeps a recurrent state; choose a target with plain attention")
    return model


def _load_error(name: str, place: str, error: Exception) -> InputError:
    """What went wrong while loading, as one line that says what to do."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    text = str(error).lower()
    if isinstance(error, BROKEN_FILE) or "safetensor" in text or "pytorchstreamreader" in text:
        return InputError(f"target: the weights of {name} are broken ({first}); download or copy them again")
    if "trust_remote_code" in text:
        return InputError(f"target: {name} brings its own code; set target.trust_remote_code=true if you trust it")
    if "model type" in text or "unrecognized" in text or "model_type" in text:
        return InputError(f"target: {name} has an unknown architecture ({first}); use one that transformers knows")
    if not Path(place).is_dir():
        return InputError(
            f"target: {name} is neither a folder, nor in the local cache, nor reachable on the hub ({first}); "
            f"check the name and the network, or use {smollm2.NAME}"
        )
    return InputError(f"target: {name} could not be loaded ({first}); check that the folder is complete")


class _QuietProgress:
    """No progress bars of transformers and no retry lines of the hub client inside: the program has its own."""

    def __enter__(self) -> None:
        self.shown = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        self.level = hub_logging.get_verbosity()
        hub_logging.set_verbosity_error()

    def __exit__(self, *exception: object) -> None:
        hub_logging.set_verbosity(self.level)
        if self.shown:
            transformers.utils.logging.enable_progress_bar()
