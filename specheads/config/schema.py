"""What a recipe may say: every key with its type, default and limits. Unknown keys are errors (``load`` names them)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    """A strict, frozen group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetSection(Section):
    """The frozen model that the head is trained for."""

    name: str = Field(default="smollm2-135m", min_length=1)  # embedded default, hub id, or folder
    dtype: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 where a one-second probe shows it 1.2 times as fast
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False


class DataSection(Section):
    """Prompts, the target's answers to them, and the features computed from both."""

    prompts: str = "builtin"  # "builtin" or a JSONL file of {"messages": [...]}
    answers: str | None = None  # distilled JSONL, "builtin" (ships for smollm2-135m), or none: the target writes them
    live_rows: int | None = Field(default=None, ge=0)  # prompts answered now (none: all, or 0 beside ``answers``)
    samples_per_prompt: int = Field(default=1, ge=1)
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(default=(0.0, 0.8), min_length=1)  # taken in turn
    max_new_tokens: int = Field(default=192, ge=1)
    max_prompt_tokens: int = Field(default=512, ge=1)
    max_length: int = Field(default=512, ge=8)  # longer rows are cut to it, counted and reported
    batch_size: int = Field(default=32, ge=1)  # prompts that are answered at once
    max_tokens: int | None = Field(default=None, ge=1)  # limit of the training text, none: all rows
    heldout_rows: int = Field(default=48, ge=1)  # rows kept out of training, whole prompts at a time: they judge it
    features: Literal["cached", "online"] = "cached"
    tokens_per_batch: int = Field(default=2048, ge=16)  # of the target forwards that compute features

    @model_validator(mode="after")
    def _has_text(self) -> DataSection:
        if self.answers is None and self.live_rows == 0:
            raise ValueError("answers (a file, or builtin) or live_rows above 0, or nothing is there to train on")
        return self


class MedusaSection(Section):
    """Medusa-1 (Cai et al. 2024): K independent heads on the target's last hidden state."""

    type: Literal["medusa"]
    num_heads: int = Field(default=4, ge=1, le=16)
    num_blocks: int = Field(default=1, ge=1, le=8)
    layout: Literal["own", "shared"] = "own"  # an output matrix for each head, or the target's for all
    objective: Literal["teacher", "labels"] = "teacher"
    head_decay: float = Field(default=0.8, gt=0, le=1)
    draft_vocab_size: int | None = Field(default=None, ge=1)


class Eagle3Section(Section):
    """EAGLE-3 (Li et al. 2025): one decoder layer over fused features, trained with training-time test."""

    type: Literal["eagle3"]
    layer_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None  # none: 2, L//2, L-3 as published
    feature_norm: bool = True
    ttt_steps: int = Field(default=3, ge=1, le=16)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    intermediate_size: int | None = Field(default=None, ge=1)  # none: the target's, as the three below
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    draft_vocab_size: int | None = Field(default=8192, ge=1)
    init_output_from_target: bool = True


HeadSection = Annotated[MedusaSection | Eagle3Section, Field(discriminator="type")]


class TrainingSection(Section):
    """How the head is trained. The budget is the one of ``max_steps``, ``epochs``, ``minutes`` that ends first."""

    minutes: float | None = Field(default=None, gt=0)  # wall clock; the schedule follows it
    max_steps: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    rows_per_batch: int = Field(default=2, ge=1)  # rows of one micro-batch, over all processes together
    accumulate: int = Field(default=1, ge=1)  # micro-batches of an optimiser step
    optimizer: Literal["muon", "adamw"] = "muon"  # muon: Muon for hidden 2-D weights, AdamW for the rest
    learning_rate: float = Field(default=1e-3, gt=0)  # AdamW
    muon_learning_rate: float = Field(default=0.02, gt=0)
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)  # 0 is off
    dtype: Literal["auto", "bf16", "fp32"] = "auto"  # of the products; the weights are fp32. auto: see target.dtype
    log_every: int = Field(default=10, ge=1)  # steps, as the two below
    save_every: int = Field(default=200, ge=1)
    eval_every: int = Field(default=200, ge=1)
    eval_draft_steps: int | None = Field(default=7, ge=1, le=16)  # of the simulated acceptance; none: the head's own
    keep_checkpoints: int = Field(default=3, ge=1)  # newest ones, beside the best
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()  # get the recipe and metrics.jsonl's numbers

    @model_validator(mode="after")
    def _has_a_budget(self) -> TrainingSection:
        if self.minutes is None and self.max_steps is None and self.epochs is None:
            raise ValueError("one of minutes, max_steps, epochs; set training.minutes=10, for example")
        return self


class EvaluationSection(Section):
    """The benchmark: A B A B on the same prompts, in one process."""

    suite: str = "heldout"
    max_new_tokens: int = Field(default=128, ge=1)
    prompts_per_category: int | None = Field(default=None, ge=1)  # none: all of the suite
    repeats: int = Field(default=2, ge=1)
    drafters: tuple[Literal["head", "lookup", "joined"], ...] = Field(
        default=("head", "lookup", "joined"), min_length=1
    )


class DecodingSection(Section):
    """How drafts are made when text is generated."""

    drafter: Literal["joined", "head", "lookup"] = "joined"
    lookup_max_match: int = Field(default=16, ge=1)
    lookup_min_match: int = Field(default=1, ge=1)
    lookup_drafts: int = Field(default=15, ge=1)
    tree_depth: int | None = Field(default=None, ge=1, le=16)  # none: 5 for EAGLE-3, every head for Medusa
    tree_top_k: int | None = Field(default=None, ge=1)  # none: 4 for EAGLE-3, every measured rank for Medusa
    tree_nodes: int = Field(default=16, ge=2)  # of the head, root included; joined: with the look-up's
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0)  # 0 is greedy
    top_k: int = Field(default=0, ge=0)  # 0 is off
    top_p: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _matches(self) -> DecodingSection:
        if self.lookup_min_match > self.lookup_max_match:
            raise ValueError(
                f"lookup_min_match {self.lookup_min_match} is above lookup_max_match {self.lookup_max_match}"
            )
        return self


class ExportSection(Section):
    """Dialects the finished head is written in; the native checkpoint is always there."""

    formats: tuple[Literal["native", "medusa", "eagle3"], ...] = ()
    dtype: Literal["bf16", "fp32"] = "bf16"  # of the tensors; engines run the draft in the target's dtype


class Recipe(Section):
    """One reproducible pipeline: data, training, evaluation, export."""

    target: TargetSection = TargetSection()
    head: HeadSection
    data: DataSection = DataSection()
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    decoding: DecodingSection = DecodingSection()
    export: ExportSection = ExportSection()
    output_dir: str = Field(default="runs/default", min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**62)

    @field_validator("export")
    @classmethod
    def _formats_hold_the_head(cls, export: ExportSection, info: ValidationInfo) -> ExportSection:
        head: MedusaSection | Eagle3Section | None = info.data.get("head")  # none where it is wrong itself
        if head is None:
            return export
        unfit = [name for name in export.formats if name not in ("native", head.type)]
        if unfit:
            raise ValueError(
                f"formats native or {head.type} for a head of type {head.type}, not {', '.join(unfit)}; "
                f"set export.formats=[{head.type}]"
            )
        return export

    def resolved(self) -> dict[str, Any]:
        """Every key with the value that is used, JSON-able."""
        return self.model_dump(mode="json")
