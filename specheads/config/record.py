"""What a run was: resolved recipe, command line, package versions, git state. Written beside every checkpoint."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from specheads.config.schema import Recipe

PACKAGES = ("specheads", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "gguf")
_SECRET_NAME = re.compile(r"(token|(?:secret|password|passwd|api[_-]?key|credential)s?)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_)[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)")


def run_record(recipe: Recipe, facts: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON-able record of this process's run. ``facts``: what only the caller knows (dtype, threads, target)."""
    return {
        "recipe": recipe.resolved(),
        "command": command_line(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "packages": package_versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "git": git_state(),
        **(facts or {}),
    }


def command_line(arguments: list[str] | None = None) -> list[str]:
    """The command of this process with everything that looks like a token or key blotted out."""
    arguments = list(sys.argv if arguments is None else arguments)
    if arguments:
        arguments[0] = "specheads" if Path(arguments[0]).name == "__main__.py" else Path(arguments[0]).name
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and _SECRET_NAME.search(name):
            argument = f"{name}=***"
        elif shown and shown[-1].startswith("-") and "=" not in shown[-1] and _SECRET_NAME.search(shown[-1]):
            argument = "***"
        shown.append(_SECRET_VALUE.sub("***", argument))
    return shown


def package_versions() -> dict[str, str]:
    """Version of every package that can change a result; packages that are not installed are absent."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state() -> dict[str, Any] | None:
    """Commit of this source tree and whether it differs from it; None where specheads does not run from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed into site-packages, which may itself lie inside somebody's repository
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}


def _git(root: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
