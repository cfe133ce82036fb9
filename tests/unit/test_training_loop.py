"""The loop: normalisation, harmless empty batches, stops, evaluation, best checkpoint, exact resume after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import DEPTH, Record, TinyRows, make_trainer, train

from specheads.training.batches import BatchCursor, evaluation_batches
from specheads.training.metrics import Totals
from specheads.training.settings import TrainSettings
from specheads.training.state import load_state
from specheads.types import StepOutput
from specheads.utils import InputError

PROGRAM = Path(__file__).with_name("tiny_training.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # bit-equal needs equal threads


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_loss_does_not_depend_on_how_the_batch_is_cut(tmp_path: Path) -> None:
    """One batch of all rows, or seven micro-batches of two: gradients and loss agree (rows have unequal counts)."""
    runs = []
    for name, cut in (("whole", {"rows_per_batch": 14}), ("cut", {"rows_per_batch": 2, "accumulate": 7})):
        trainer = make_trainer(tmp_path / name, TinyRows(silent=(3,)), **cut)
        trainer.head.drop.p = 0.0
        totals = trainer.backward()
        norm = trainer.scale_gradients(totals.count)
        gradients = {n: p.grad.clone() for n, p in trainer.head.named_parameters()}
        runs.append((totals.summary(), norm, gradients))
    (whole, norm_a, grads_a), (cut_up, norm_b, grads_b) = runs
    assert whole["positions"] == cut_up["positions"]
    assert whole["loss"] == pytest.approx(cut_up["loss"], rel=1e-6)
    assert norm_a == pytest.approx(norm_b, rel=1e-5)
    for name in grads_a:
        torch.testing.assert_close(grads_a[name], grads_b[name], rtol=1e-5, atol=1e-7)


def test_gradient_is_that_of_the_mean_over_supervised_positions(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rows_per_batch=2, clip_norm=0)
    trainer.head.drop.p = 0.0
    rows = trainer.cursor.plan.batches(0)[0]
    totals = trainer.backward()
    trainer.scale_gradients(totals.count)
    got = {n: p.grad.clone() for n, p in trainer.head.named_parameters()}
    trainer.optimizers.zero_grad()
    from specheads.training.batches import load_batch

    out = trainer.head.training_step(load_batch(trainer.dataset, rows, trainer.head.feature_spec), trainer.parts)
    (out.loss / out.count).backward()
    for name, parameter in trainer.head.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_rows_without_a_supervised_token_are_harmless(tmp_path: Path) -> None:
    record, result = train(tmp_path, TinyRows(4, silent=(0, 1, 2)), rows_per_batch=1, max_steps=8, eval_every=8)
    assert result.steps == 8
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in record.logs)
    assert any(line["loss"] == 0 and line["gradient_norm"] == 0 for line in record.logs)
    before = make_trainer(tmp_path / "other", TinyRows(4, silent=(0, 1, 2, 3)), rows_per_batch=1, max_steps=3)
    start = {name: tensor.clone() for name, tensor in before.head.state_dict().items()}
    before.run()
    assert same(start, before.head.state_dict())


def test_training_learns_and_reports(tmp_path: Path) -> None:
    record, result = train(tmp_path, max_steps=60, rows_per_batch=7, save_every=60, eval_every=30, log_every=20)
    assert record.logs[-1]["loss"] < 0.95 * record.logs[0]["loss"]
    assert [line["step"] for line in record.logs] == [20, 40, 60]
    needed = {"loss", "tau", "acceptance", "learning_rate", "tokens_per_s", "progress", "seconds_left", "gradient_norm"}
    assert needed <= record.logs[0].keys()
    assert [line["step"] for line in record.evals] == [30, 60]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [20, 40, 60]
    assert result.best_tau == max(line["tau"] for line in record.evals)
    assert record.logs[-1]["progress"] == 1


def test_best_checkpoint_is_by_acceptance_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, max_steps=10, save_every=2, eval_every=2, keep_checkpoints=2)
    taus = iter([1.2, 1.9, 1.5, 1.4, 1.6])
    monkeypatch.setattr(trainer, "evaluate", lambda: {"tau": next(taus), "loss": 0.0})
    result = trainer.run()
    assert (result.best_step, result.best_tau, result.best.name) == (4, 1.9, "step-000004")
    assert result.last.name == "step-000010"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert kept == ["step-000004", "step-000008", "step-000010"]
    assert json.loads((tmp_path / "checkpoints" / "pointers.json").read_text())["best"]["tau"] == 1.9


def test_evaluation_counts_only_what_was_judged(tmp_path: Path) -> None:
    totals = Totals()
    tensor = torch.tensor
    totals.add(StepOutput(tensor(6.0), tensor(3), tensor([3, 1]), tensor([3, 1]), tensor([4, 4])), 9)
    totals.add(StepOutput(tensor(0.0), tensor(1), tensor([1, 1, 1]), tensor([1, 0, 0]), tensor([4, 0, 2])), 5)
    summary = totals.summary()
    assert summary["tau"] == pytest.approx(1 + 4 / 8 + 1 / 4 + 0 / 2)
    assert (summary["loss"], summary["positions"], totals.tokens) == (6 / 4, 4, 14)
    assert len(Totals().summary()["acceptance"]) == 0


def test_evaluation_leaves_training_mode_and_random_state_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = torch.get_rng_state()
    result = trainer.evaluate()
    assert result is not None
    assert len(result["acceptance"]) == DEPTH
    assert trainer.head.training
    assert torch.equal(before, torch.get_rng_state())
    assert trainer.evaluate() == result


def test_evaluation_rows_are_spread_and_distinct() -> None:
    batches = evaluation_batches(TinyRows(10), 4, 3)
    assert sorted(row for batch in batches for row in batch) == [0, 2, 5, 7]
    assert sorted(row for batch in evaluation_batches(TinyRows(5), 64, 2) for row in batch) == [0, 1, 2, 3, 4]


def test_cursor_visits_every_row_and_carries_over_the_tail() -> None:
    cursor = BatchCursor(TinyRows(5), seed=0, rows_per_batch=2, rank=0, world=1)  # 3 batches an epoch
    first = cursor.take(2) + cursor.take(2)
    assert (cursor.epoch, cursor.position) == (1, 1)
    assert {row for batch in first[:3] for row in batch} == set(range(5))
    place = cursor.state()
    ahead = cursor.take(5)
    cursor.restore(place)
    assert cursor.take(5) == ahead


def test_nan_stops_before_the_weights_change(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_every=1, max_steps=6)
    numbers = {"calls": 0}
    step = type(trainer.head).training_step

    def poisoned(inputs: Any, parts: Any, steps: int | None = None) -> StepOutput:
        numbers["calls"] += 1
        out = step(trainer.head, inputs, parts)
        if numbers["calls"] == 4:
            out.loss = out.loss * float("nan")
        return out

    trainer.head.training_step = poisoned  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"loss nan.* at step 4, expected finite"):
        trainer.run()
    saved = weights(tmp_path / "checkpoints" / "step-000003")
    assert same(saved, trainer.head.state_dict())


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    """Same process, every optimiser; dropout makes the random state count, and step 4 is not an epoch's end."""
    for optimizer in ("muon", "adamw"):
        kind = {"optimizer": optimizer, "accumulate": 2}
        _, whole = train(tmp_path / optimizer / "whole", **kind)
        part = make_trainer(tmp_path / optimizer / "part", **kind)

        class Stop(Record):
            def on_save(self, step: int, folder: Path, is_best: bool) -> None:
                if step == 8:
                    raise KeyboardInterrupt

        part.log.callbacks = Stop()
        with pytest.raises(KeyboardInterrupt):
            part.run()
        torch.manual_seed(1234)  # whatever happened in between
        random.seed(5)
        record, again = train(tmp_path / optimizer / "part", **kind)
        assert record.logs[0]["step"] == 9
        assert same(weights(whole.last), weights(again.last))
        assert (whole.best_tau, whole.best_step, whole.tokens) == (again.best_tau, again.best_step, again.tokens)
        a, b = load_state(whole.last), load_state(again.last)
        for name in ("cursor", "best", "step", "tokens", "depends_on"):
            assert a[name] == b[name]
        steps = [json.loads(x)["step"] for x in (tmp_path / optimizer / "part/metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps)


def test_a_finished_training_is_not_trained_again(tmp_path: Path) -> None:
    _, first = train(tmp_path)
    record, second = train(tmp_path)
    assert not record.logs
    assert (second.steps, second.last, second.best_tau) == (first.steps, first.last, first.best_tau)


def test_kill_and_resume_is_bit_identical(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM)]
    _, whole = train(tmp_path / "whole")
    process = subprocess.Popen(
        [*command, str(tmp_path / "part")],
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "TINY_SLEEP": "0.2"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.split() == ["step", "10"]:  # the last checkpoint is step 8
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "part/checkpoints/step-000012").exists()
    (tmp_path / "part/checkpoints/.step-000010.x.part").mkdir()  # what a kill in the middle of a write leaves
    _, again = train(tmp_path / "part")
    assert same(weights(whole.last), weights(again.last))
    assert not list((tmp_path / "part/checkpoints").glob(".step-*"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"learning_rate": 2e-3}, "training.learning_rate"),
        ({"max_steps": 13}, "training.max_steps"),
        ({"seed": 1}, "training.seed"),
        ({"dataset": TinyRows(seed=5)}, "dataset"),
        ({"dtype": "bf16"}, "training.dtype"),
    ],
)
def test_resume_refuses_another_run(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    train(tmp_path, max_steps=2, save_every=2)
    with pytest.raises(InputError, match=rf"resume: {field} is "):
        train(tmp_path, **{"max_steps": 2, "save_every": 2, **change})


def test_resume_allows_what_changes_no_weight(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, save_every=2)
    train(tmp_path, max_steps=2, save_every=1, log_every=2, keep_checkpoints=1)


def test_damaged_trainer_state_is_named(tmp_path: Path) -> None:
    _, result = train(tmp_path, max_steps=2)
    state = result.last / "trainer_state.pt"
    state.write_bytes(state.read_bytes()[:500])
    with pytest.raises(InputError, match=r"trainer_state\.pt is damaged"):
        train(tmp_path, max_steps=2)


def test_disk_full_keeps_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, max_steps=4, save_every=4)
    trainer = make_trainer(tmp_path, max_steps=4, save_every=4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer.resume()
    monkeypatch.setattr("specheads.checkpoints.io.save_file", full)
    trainer.step = 5
    with pytest.raises(InputError, match="No space left on device"):
        trainer.checkpoint(evaluate=False, save=True)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["pointers.json", "step-000004"]


def test_minutes_decide_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0}
    monkeypatch.setattr("specheads.training.trainer.time.monotonic", lambda: clock["now"])
    trainer = make_trainer(tmp_path, max_steps=None, minutes=1, save_every=3, warmup_steps=0, schedule="linear")
    step = trainer.train_step
    rates = []

    def timed(progress: float) -> dict[str, Any]:
        clock["now"] += 10
        numbers = step(progress)
        rates.append(numbers["learning_rate"]["adamw"] / 1e-3)
        return numbers

    monkeypatch.setattr(trainer, "train_step", timed)
    result = trainer.run()
    assert result.steps == 6
    assert rates == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert load_state(result.last)["elapsed"] == 60


def test_bf16_runs_over_fp32_weights(tmp_path: Path) -> None:
    _, result = train(tmp_path, dtype="bf16", max_steps=3)
    assert {tensor.dtype for tensor in weights(result.last).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": None}, "got no budget"),
        ({"optimizer": "sgd"}, "training.optimizer: got 'sgd'"),
        ({"rows_per_batch": 0}, "training.rows_per_batch: got 0"),
        ({"minutes": -1}, "training.minutes: got -1"),
        ({"dtype": "fp16"}, "training.dtype"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainSettings(**{"max_steps": 1, **change})


def test_epochs_to_steps() -> None:
    assert TrainSettings(epochs=2, accumulate=4).steps_for(10) == 5
    assert TrainSettings(epochs=2, max_steps=3).steps_for(10) == 3
    assert TrainSettings(minutes=1).steps_for(10) is None


def test_the_target_is_never_trained(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    frozen = {id(p) for p in trainer.parts.embed_tokens.parameters()} | {id(trainer.parts.output_weight)}
    assert not frozen & {id(p) for p in trainer.optimizers.parameters}
    assert not frozen & {id(p) for p in trainer.model.parameters()}


def test_a_budget_of_an_instant_is_one_step(tmp_path: Path) -> None:
    _, result = train(tmp_path, minutes=1e-9, max_steps=None)
    assert result.steps == 1
    assert (result.best / "model.safetensors").is_file()
