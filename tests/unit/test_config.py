"""Recipes: precedence, and one readable line for every mistake."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from specheads.config import record
from specheads.config.load import HEAD_SECTIONS, load_recipe, parse_override, recipe_of
from specheads.config.schema import Eagle3Section, MedusaSection, Recipe
from specheads.utils import InputError

YAML = """\
target:
  name: smollm2-135m
head:
  type: eagle3
  ttt_steps: 2
training:
  minutes: 3
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_precedence_is_defaults_then_yaml_then_command_line(recipe_file: Path) -> None:
    plain = load_recipe(recipe_file)
    assert plain.head.ttt_steps == 2
    assert plain.training.minutes == 3
    assert plain.training.clip_norm == Recipe(head=plain.head, training={"minutes": 1}).training.clip_norm
    over = load_recipe(recipe_file, ["training.minutes=7", "head.ttt_steps=1", "training.learning_rate=1e-4"])
    assert (over.training.minutes, over.head.ttt_steps, over.training.learning_rate) == (7, 1, 1e-4)
    assert over.target == plain.target


def test_overrides_are_yaml_values(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "head.layer_ids=[1, 2]",
            "target.revision=null",
            "head.feature_norm=false",
            "output_dir=a=b",
            "data.temperatures=[0]",
        ],
    )
    assert recipe.head.layer_ids == (1, 2)
    assert recipe.target.revision is None
    assert recipe.head.feature_norm is False
    assert recipe.output_dir == "a=b"
    assert recipe.data.temperatures == (0.0,)
    assert parse_override("a.b=") == (("a", "b"), None)


def test_a_new_head_type_drops_the_options_of_the_old_one(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["head.type=medusa", "head.num_heads=3"])
    assert isinstance(recipe.head, MedusaSection)
    assert recipe.head.num_heads == 3


def test_a_wrong_key_names_the_nearest_its_section_and_line(recipe_file: Path) -> None:
    recipe_file.write_text(YAML.replace("ttt_steps", "ttt_stepz"))
    text = error_of(recipe_file)
    assert text.startswith("head.ttt_stepz: unknown key")
    assert "line 5" in text
    assert "head.ttt_steps" in text
    assert str(recipe_file) in text
    recipe_file.write_text(YAML.replace("minutes", "minits"))
    text = error_of(recipe_file)
    assert "line 7" in text
    assert text.endswith("training.minutes")


def test_a_wrong_section_is_named_too(recipe_file: Path) -> None:
    assert "nearest right key is training" in error_of(recipe_file, "trainig.minutes=3")
    assert "command line: trainig.minutes=3" in error_of(recipe_file, "trainig.minutes=3")


def test_a_key_of_another_section_is_found(recipe_file: Path) -> None:
    assert "nearest right key is data.batch_size" in error_of(recipe_file, "training.batch_size=3")
    assert "nearest right key is training.minutes" in error_of(recipe_file, "minutes=3")
    assert "head.num_blocks of type medusa" in error_of(recipe_file, "head.num_blocks=3")


@pytest.mark.parametrize("head", list(HEAD_SECTIONS))
def test_a_head_may_be_exported_natively_and_in_its_own_dialect(recipe_file: Path, head: str) -> None:
    recipe = load_recipe(recipe_file, [f"head.type={head}", f"export.formats=[native, {head}]"])
    assert recipe.export.formats == ("native", head)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.minutes=soon", ("training.minutes", "'soon'", "number")),
        ("training.minutes=-1", ("training.minutes", "-1", "greater than 0")),
        ("training.minutes=.nan", ("training.minutes", "nan", "finite")),
        ("target.dtype=fp16", ("target.dtype", "'fp16'", "'bf16'")),
        ("head.type=eagle9", ("head.type", "eagle3", "medusa")),
        ("training=3", ("training", "3", "keys below it")),
        ("decoding.lookup_min_match=99", ("decoding", "lookup_min_match 99")),
        ("data.temperatures=[]", ("data.temperatures", "at least 1")),
        (
            "export.formats=[native, medusa]",
            ("export", "formats native or eagle3 for a head of type eagle3, not medusa"),
        ),
        ("training", ("override", "section.key=value")),
        ("=3", ("override", "section.key=value")),
        ("target.name.x=1", ("below name",)),
        ("training.minutes=[1", ("training.minutes", "not YAML")),
        ("output_dir=2026-13-45", ("output_dir", "not YAML")),
        (f"seed={2**70}", ("seed", "less than")),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_expectation(
    recipe_file: Path, override: str, parts: tuple[str, ...]
) -> None:
    text = error_of(recipe_file, override)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("head: [\n", "line 2: broken YAML"),
        ("- 1\n- 2\n", "a list"),
        ("hello\n", "one text"),
        ("head:\n  type: eagle3\nhead:\n  type: medusa\n", "line 3: head is set twice"),
        ("target:\n  name: x\n", "head: missing"),
        ("head:\n  ttt_steps: 2\ntraining:\n  minutes: 1\n", "head.type"),
        ("head:\n  type: eagle3\ntraining:\n  rows_per_batch: 2\n", "one of minutes, max_steps, epochs"),
        ("head:\n", "head"),
    ],
)
def test_broken_files_are_one_line(recipe_file: Path, content: str, part: str) -> None:
    recipe_file.write_text(content)
    text = error_of(recipe_file)
    assert part in text
    assert str(recipe_file) in text


def test_missing_files_folders_and_bytes_are_one_line(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "none.yaml")
    assert "is a folder" in error_of(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "UTF-8" in error_of(tmp_path / "bytes.yaml")


def test_a_resolved_recipe_comes_back_the_same(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["head.layer_ids=[1, 2, 3]"])
    assert recipe_of(recipe.resolved()) == recipe
    values = recipe.resolved()
    assert recipe_of(values, ["seed=5"]).seed == 5
    assert values["seed"] == recipe.seed  # the dictionary given is not changed


def test_sections_are_frozen_and_every_head_type_is_listed(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    with pytest.raises(ValidationError):
        recipe.training.minutes = 5  # type: ignore[misc]
    assert {"medusa": MedusaSection, "eagle3": Eagle3Section} == HEAD_SECTIONS


def test_the_record_holds_recipe_versions_and_git_but_no_secret(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["/x/specheads/__main__.py", "train", "r.yaml", "hub.token=abc", "--api-key", "def", "--out", "keep"]
    arguments += ["hf_AAAAAAAAAAAAAAAA", "https://me:secret@host/x"]
    monkeypatch.setattr("sys.argv", arguments)
    found = record.run_record(load_recipe(recipe_file), {"dtype": "fp32"})
    assert found["command"] == [
        "specheads", "train", "r.yaml", "hub.token=***", "--api-key", "***", "--out", "keep", "***", "https://***@host/x",
    ]  # fmt: skip
    assert found["recipe"]["training"]["minutes"] == 3
    assert found["dtype"] == "fp32"
    assert "torch" in found["packages"]
    monkeypatch.setattr(record, "__file__", str(tmp_path / "a" / "b" / "record.py"))
    assert record.git_state() is None  # outside of a checkout


def test_the_git_state_tells_commit_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *arguments], check=True, capture_output=True)

    (tmp_path / "file").write_text("1")
    git("init")
    monkeypatch.setattr(record, "__file__", str(tmp_path / "a" / "b" / "record.py"))
    assert record.git_state() is None  # no commit yet
    git("add", "file")
    git("commit", "-m", "first")
    state = record.git_state()
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    changed = record.git_state()
    assert changed is not None
    assert changed["dirty"] is True


def test_a_head_type_after_its_options_keeps_them(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["head.num_heads=2", "head.type=medusa", "export.formats=[medusa]"])
    assert (recipe.head.type, recipe.head.num_heads) == ("medusa", 2)


def test_a_recipe_without_any_text_is_refused(recipe_file: Path) -> None:
    assert "nothing is there to train on" in error_of(recipe_file, "data.answers=null", "data.live_rows=0")


def test_keys_that_end_in_tokens_are_no_secret() -> None:
    shown = record.command_line(
        ["specheads", "train", "data.max_tokens=200", "--tokens", "64", "hub.token=abc", "--api-keys=x"]
    )
    assert shown == ["specheads", "train", "data.max_tokens=200", "--tokens", "64", "hub.token=***", "--api-keys=***"]


def test_a_recipe_that_holds_itself_is_one_line(recipe_file: Path) -> None:
    recipe_file.write_text("a: &a {b: *a}\n")
    assert "broken YAML" in error_of(recipe_file)
