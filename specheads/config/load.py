"""Recipe YAML plus ``section.key=value`` overrides → a strict ``Recipe``; every mistake is one line.

Precedence: the defaults of ``schema``, then the YAML file, then the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from specheads.config.schema import Eagle3Section, MedusaSection, Recipe
from specheads.utils import InputError

Key = tuple[str, ...]  # ("data", "batch_size")
HEAD_SECTIONS: dict[str, type[BaseModel]] = {"medusa": MedusaSection, "eagle3": Eagle3Section}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and lay the command line's ``section.key=value`` over it.

    Raises:
        InputError: a missing, empty or broken file, an unknown key, or a value that does not fit.
    """
    path = Path(path)
    values, lines = _read_yaml(path)
    origin = {key: f"{path}, line {line}" for key, line in lines.items()}
    return _validated(values, origin, overrides, str(path))


def recipe_of(values: dict[str, Any], overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """The recipe of a dictionary (a built-in one, or one that was saved beside a checkpoint) plus overrides.

    Raises:
        InputError: as ``load_recipe``.
    """
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    return _validated(copied, {}, overrides, source)


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """The file's values and the line (from 1) of every key."""
    if path.is_dir():
        raise InputError(f"recipe: {path} is a folder, expected a YAML file; give one of the files in recipes/")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"recipe: {path} does not exist; give a YAML file, such as those in recipes/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe: {path} cannot be read as UTF-8 text ({error}); expected a YAML file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
        marks = list(_marks(node, ())) if node is not None else []
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that no calendar has
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error) or "not YAML"
        raise InputError(f"recipe: {path}{where}: broken YAML ({problem}); correct the file") from None
    if node is None or values is None:
        raise InputError(f"recipe: {path} is empty, expected sections such as head: and training:")
    if not isinstance(values, dict):
        raise InputError(f"recipe: {path} holds {_kind(values)}, expected sections of keys such as head: and training:")
    lines: dict[Key, int] = {}
    for key, line in marks:
        if key in lines:
            raise InputError(
                f"recipe: {path}, line {line}: {'.'.join(key)} is set twice (first in line {lines[key]}); keep one"
            )
        lines[key] = line
    return values, lines


def _marks(node: yaml.Node, above: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = (*above, str(name.value))
            yield key, name.start_mark.line + 1
            yield from _marks(value, key)


def _validated(values: dict[str, Any], origin: dict[Key, str], overrides: Sequence[str], source: str) -> Recipe:
    for override in sorted(overrides, key=lambda text: not text.startswith("head.type=")):  # it empties its section
        key, value = parse_override(override)
        _put(values, key, value, override)
        for length in range(1, len(key) + 1):  # a section that only the command line names comes from there too
            origin.setdefault(key[:length], f"command line: {override}")
        origin[key] = f"command line: {override}"
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(_one_line(error, values, origin, source)) from None


def parse_override(text: str) -> tuple[Key, Any]:
    """``section.key=value`` → key and value, the value read as YAML (``a.b=[1, 2]``, ``a.b=null``, ``a.b=1e-3``).

    Raises:
        InputError: no ``=``, an empty name, or a value that is not YAML.
    """
    name, equals, value = text.partition("=")
    parts = tuple(name.strip().split("."))
    if not equals or not all(parts):
        raise InputError(f"override: got {text!r}, expected section.key=value, such as training.minutes=10")
    try:
        return parts, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that no calendar has
        raise InputError(f"{name}: the value {value!r} is not YAML; put it in quotes, or lists in [ ]") from None


def _put(values: dict[str, Any], key: Key, value: Any, text: str) -> None:
    """Set one key; naming another head type starts that section anew, its keys belong to the old type."""
    inner = values
    for name in key[:-1]:
        found = inner.setdefault(name, {})
        if found is None:  # "section:" with nothing below it
            found = inner[name] = {}
        if not isinstance(found, dict):
            raise InputError(f"override: {text!r} asks for a key below {name}, which is {found!r} and has none")
        inner = found
    if key == ("head", "type") and inner.get("type") not in (None, value):
        inner.clear()
    inner[key[-1]] = value


def _kind(value: Any) -> str:
    return {"str": "one text", "list": "a list"}.get(type(value).__name__, f"one {type(value).__name__}")


def _one_line(error: ValidationError, values: dict[str, Any], origin: dict[Key, str], source: str) -> str:
    """The first error of pydantic's list as one line; unknown keys first, since they explain the missing ones."""
    found = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    first = found[0]
    key = tuple(str(part) for part in first["loc"])
    if len(key) > 1 and key[0] == "head" and key[1] in HEAD_SECTIONS:
        key = (key[0], *key[2:])  # pydantic puts the head's type into the place
    where = _origin(key, origin, source)
    rest = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{'.'.join(key)}: unknown key ({where}){rest}; {_advice(key, values)}"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return f"head.type: expected {' or '.join(HEAD_SECTIONS)} ({where}){rest}; such as head: {{type: eagle3}}"
    if first["type"] == "missing":
        return f"{'.'.join(key)}: missing ({where}){rest}; add it to the recipe"
    if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{'.'.join(key)}: got {first['input']!r}, expected keys below it ({where}){rest}"
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    shown = repr(first["input"]) if not isinstance(first["input"], dict) else "these values"
    return f"{'.'.join(key)}: got {shown}, expected {expected} ({where}){rest}"


def _origin(key: Key, origin: dict[Key, str], source: str) -> str:
    for length in range(len(key), 0, -1):
        if key[:length] in origin:
            return origin[key[:length]]
    return source


def _sections(values: dict[str, Any]) -> dict[str, type[BaseModel]]:
    """Section name → its model; the head's by its type."""
    sections: dict[str, type[BaseModel]] = {}
    for name, info in Recipe.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            sections[name] = info.annotation
    head = values.get("head")
    kind = head.get("type") if isinstance(head, dict) else None
    sections["head"] = HEAD_SECTIONS.get(str(kind), Eagle3Section)
    return sections


def _advice(key: Key, values: dict[str, Any]) -> str:
    """What was probably meant: the nearest key of the same section, then the nearest of any."""
    sections = _sections(values)
    if len(key) == 1:
        near = difflib.get_close_matches(key[0], list(Recipe.model_fields), n=1)
        homes = [f"{name}.{key[0]}" for name, model in sections.items() if key[0] in model.model_fields]
        if near or homes:
            return f"the nearest right key is {near[0] if near else homes[0]}"
        return f"a recipe has {', '.join(Recipe.model_fields)}"
    section, name = key[0], key[1]
    own = list(sections[section].model_fields) if section in sections else []
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
    if near:
        return f"the nearest right key is {section}.{near[0]}"
    exact = [f"{other}.{name}" for other, model in sections.items() if name in model.model_fields]
    if section == "head":
        exact += [f"head.{name} of type {kind}" for kind, model in HEAD_SECTIONS.items() if name in model.model_fields]
    if exact:
        return f"the nearest right key is {exact[0]}"
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.4)
    if near:
        return f"the nearest right key is {section}.{near[0]}"
    return f"section {section} has {', '.join(own)}"
