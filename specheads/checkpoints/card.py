"""The model card (README.md) beside an exported draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specheads.types import TargetConfig

ROWS = {"head": "drafts of this head alone", "joined": "of this head and of an n-gram look-up, in one tree"}
SHOWN = ("tau", "speedup_vs_hf", "speedup", "tokens_per_s", "hf_tokens_per_s", "identical", "prompts", "tokens")


def model_card(
    head: str,
    format: str,
    target: TargetConfig,
    config: Mapping[str, Any],
    readers: str,
    numbers: Mapping[str, Mapping[str, Any]] | None,
    trained_length: int | None = None,
) -> str:
    """Markdown: what the draft is, who reads it, and what was measured (never more than was given).

    ``readers``: who loads the format. ``numbers``: a benchmark's overall row by drafter; those that use this head are
    shown. ``trained_length``: tokens of the longest rows it was trained on.
    """
    layers = config.get("eagle_aux_hidden_state_layer_ids", config.get("feature_layers"))
    lines = [
        "---",
        f"base_model: {target.name}",
        "library_name: specheads",
        "tags: [speculative-decoding, draft-head]",
        "---",
        f"# {head} draft for {target.name}",
        "",
        f"- Format: {format}; read by {readers}.",
        f"- Target: {target.name} (hidden size {target.hidden_size}, vocabulary {target.vocab_size}, "
        f"{target.num_layers} layers, fingerprint {target.fingerprint}). It drafts for this target only.",
    ]
    if layers:
        lines.append(f"- Feature layers: {', '.join(map(str, layers))} (id i is the input of layer i).")
    if trained_length is not None:
        lines.append(
            f"- Trained on rows of at most {trained_length} tokens; usable over the target's {target.context_limit} "
            "positions (the output is the target's everywhere, longer texts may accept fewer drafts)."
        )
    lines += ["", "## Measured", ""]
    measured = {name: numbers[name] for name in ROWS if numbers and name in numbers}
    if measured:
        lines += [_line("", *measured), "|---" * (1 + len(measured)) + "|"]
        for name in SHOWN:
            values = [row.get(name) for row in measured.values()]
            if any(value is not None for value in values):
                lines.append(_line(name, *map(_short, values)))
        lines.append("\n" + "; ".join(f"{name}: {ROWS[name]}" for name in measured) + ".")
        lines.append("tau: tokens emitted per target forward, the bonus token included.")
    else:
        lines.append("Nothing was measured for this card; run `specheads evaluate` on this folder.")
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _short(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
