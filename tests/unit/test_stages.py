"""Stages are reused only when their inputs are the same and what they made still stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specheads.jobs.screen import NoScreen
from specheads.jobs.stages import Stages, clear, file_digest
from specheads.utils import InputError


class Lines(NoScreen):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


def test_a_finished_stage_is_reused_and_says_why(tmp_path: Path) -> None:
    screen, calls = Lines(), []

    def work() -> dict[str, Any]:
        calls.append(1)
        return {"loss": 2.5}

    inputs = {"target": "abc", "layers": (1, 2), "rows": 3}
    assert Stages(tmp_path, screen).run("train", inputs, work) == {"loss": 2.5}
    assert screen.lines == []
    assert Stages(tmp_path, screen).run("train", inputs, work) == {"loss": 2.5}
    assert len(calls) == 1
    assert "train: done, reused" in screen.lines[0]
    assert "same target, layers, rows; fingerprint" in screen.lines[0]


def test_changed_inputs_run_again_and_say_what_changed(tmp_path: Path) -> None:
    screen = Lines()
    stages = Stages(tmp_path, screen)
    assert stages.run("train", {"training": {"minutes": 1, "seed": 0}}, lambda: 1) == 1
    assert stages.run("train", {"training": {"minutes": 2, "seed": 0}}, lambda: 2) == 2
    assert "training.minutes changed from 1 to 2" in screen.lines[0]
    assert stages.ran == ["train", "train"]


def test_a_missing_product_runs_again(tmp_path: Path) -> None:
    screen = Lines()
    stages = Stages(tmp_path, screen)
    product = tmp_path / "file"

    def work() -> None:
        product.write_text("x")

    stages.run("a", {}, work, [product])
    stages.run("a", {}, work, [product])
    assert stages.reused == ["a"]
    product.unlink()
    stages.run("a", {}, work, [product])
    assert "is gone" in screen.lines[-1]
    assert stages.ran == ["a", "a"]


def test_an_interrupted_stage_leaves_no_marker(tmp_path: Path) -> None:
    stages = Stages(tmp_path, NoScreen())

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.run("a", {}, stopped)
    assert stages.read("a") is None
    assert stages.run("a", {}, lambda: 7) == 7


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"fingerprint": 1}'])
def test_a_damaged_marker_counts_as_none(tmp_path: Path, damage: str) -> None:
    stages = Stages(tmp_path, NoScreen())
    stages.run("a", {"x": 1}, lambda: 1)
    marker = tmp_path / "stages" / "a.json"
    assert json.loads(marker.read_text())["inputs"] == {"x": 1}
    marker.write_text(damage)
    assert stages.run("a", {"x": 1}, lambda: 2) == 2


def test_file_digest_follows_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert file_digest(path) == "absent"
    path.write_text("a")
    first = file_digest(path)
    path.write_text("b")
    assert file_digest(path) != first


def test_only_the_folder_of_a_run_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    (tmp_path / "notes").mkdir()
    with pytest.raises(InputError, match=r"--fresh: .* holds data, but neither run.json"):
        clear(tmp_path, ("stages", "data"))
    assert (tmp_path / "data" / "thesis.txt").read_text() == "mine"
    Stages(tmp_path, NoScreen()).run("pace", {}, lambda: 1)
    clear(tmp_path, ("stages", "data"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    clear(tmp_path / "new", ("data",))


def test_a_failed_start_gives_no_right_to_clear(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "auto_dtype.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.csv").write_text("precious")
    with pytest.raises(InputError, match="no quickstart made it"):
        clear(tmp_path, ("stages", "data"))
    assert (tmp_path / "data" / "mine.csv").read_text() == "precious"


def test_what_auto_meant_in_a_failed_start_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "auto_dtype.json").write_text("{}")
    clear(tmp_path, ("stages", "data"))
    assert not (tmp_path / "stages" / "auto_dtype.json").exists()
