"""The house's floors: a file imports only from floors below it (or from its own room), transformers has two doors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "specheads"
FLOORS: dict[str, int] = {
    "cli": 8, "__main__": 8,
    "jobs": 7, "build": 7,
    "training": 6, "evaluation": 6, "serving": 6,
    "decoding": 5,
    "data": 4, "checkpoints": 4,
    "heads": 3, "target": 3, "verify": 3,
    "tree": 2,
    "config": 1, "modules": 1, "losses": 1, "sampling": 1, "types": 1, "utils": 1, "hardware": 1,
}  # fmt: skip
TOP = {"jobs": 2, "build": 1}  # the order within floor 7
GROUND = {"types", "utils", "modules", "losses", "sampling", "config", "hardware"}  # floor 1 is read by all, itself too
DOORS = ("target/", "data/tokenize.py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            module = node.module or ""
            # "from specheads import build" names the module in the list
            yield from (
                (node.lineno, f"{module}.{alias.name}" if module == "specheads" else module) for alias in node.names
            )


def violations(place: str, source: str) -> list[str]:
    """What a file at ``place`` (relative to the package) imports from where it may not."""
    room = place.split("/")[0].removesuffix(".py")
    own = 10 if room == "__main__" else FLOORS[room]  # the entry point stands above the command line
    found = []
    for line, module in imported(ast.parse(source)):
        parts = module.split(".")
        if parts[0] == "transformers" and not place.startswith(DOORS):
            found.append(f"{place}:{line}: transformers outside of its doors")
        if parts[0] != "specheads" or len(parts) < 2 or parts[1] == room:
            continue
        other = parts[1]
        if other not in FLOORS:
            found.append(f"{place}:{line}: {module} has no floor")
        elif FLOORS[other] > own:
            found.append(f"{place}:{line}: imports {module} of floor {FLOORS[other]} from floor {own}")
        elif FLOORS[other] == own and other not in GROUND and TOP.get(other, 9) >= TOP.get(room, 0):
            found.append(f"{place}:{line}: {room} and {other} are neighbours and may not know each other")
    return found


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("place", FILES)
def test_imports_go_down_only(place: str) -> None:
    if place == "__init__.py":
        pytest.skip("the package root belongs to no floor")
    assert place.split("/")[0].removesuffix(".py") in FLOORS, f"{place} stands in a room without a floor"
    assert violations(place, (PACKAGE / place).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("heads/x.py", "from specheads.target.adapter import Target"),
        ("heads/x.py", "def f():\n    from specheads.decoding import decoder"),
        ("training/x.py", "import specheads.evaluation.report"),
        ("types.py", "from specheads.tree import draft_tree"),
        ("build.py", "from specheads.jobs import train"),
        ("decoding/x.py", "import transformers"),
        ("data/collate.py", "from transformers import AutoTokenizer"),
    ],
)
def test_the_check_sees_a_breach(place: str, source: str) -> None:
    assert len(violations(place, source)) == 1


def test_the_check_lets_the_rest_through() -> None:
    source = "import torch\nfrom specheads.utils import InputError\nfrom specheads.tree.draft_tree import DraftTree\n"
    assert violations("heads/medusa.py", source) == []
    assert violations("data/tokenize.py", "import transformers") == []
    assert violations("jobs/train.py", "from specheads import build") == []
