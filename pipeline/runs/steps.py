"""Which directories are checkpoints, by their names: `step-` and eight digits or more."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")


def named(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def complete(root: Path) -> dict[int, Path]:
    """By step, oldest first. What is still being written has another name, and so has what a person put aside."""
    found = {
        int(name[1]): p
        for p in root.glob("step-*")
        if (name := _NAME.fullmatch(p.name)) and p.is_dir()
    }
    return dict(sorted(found.items()))
