"""`launch evaluate --tasks`: questions from files of the user, and tasks of lm-eval."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.tables import new_console, print_json, table
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer
    from pipeline.tasks.answering import Reader
    from pipeline.tasks.questions import Task

MOST_PROCESSES = 8  # or as many as there are CPUs, if these are more; each loads the model


def evaluate_tasks(
    run: Path,
    tasks: Sequence[str],
    *,
    questions: int | None,
    shots: int | None,
    folder: Path | None,
    processes: int | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Print the scores of a run; a task is a file if one has its name, or a task of lm-eval."""
    from pipeline.tasks import harness
    from pipeline.tasks.questions import read_tasks

    files = [task for task in tasks if Path(task).is_file()]
    names = [task for task in tasks if task not in files]
    _refuse_options(names, shots, folder, processes)
    given = [task.sample(questions) for task in read_tasks(files)]

    # Imported after the checks, because torch takes seconds.
    import torch

    from pipeline.checkpoint.restore import run_config
    from pipeline.runs.directory import tokenizer_of
    from pipeline.tasks.answering import open_model

    config = run_config(run)
    pieces = tokenizer_of(run, config.data.dir, tokenizer)
    with open_model(run, processes or max(1, torch.cuda.device_count())) as reader:
        rows = [row for task in given for row in _rows(task, reader, pieces)]
        more = (
            harness.evaluate(names, reader, pieces, folder=folder, questions=questions, shots=shots)
            if names
            else {}
        )
    if as_json:
        print_json({"run": str(run), "tasks": {row.pop("task"): row for row in rows} | more})
        return
    console = new_console()
    if rows:
        columns = ("task", "accuracy", "per byte", "bits/byte", "questions")
        lines = [
            (
                str(row["task"]),
                f"{row['accuracy']:.1%}",
                f"{row['accuracy_per_byte']:.1%}",
                f"{row['bits_per_byte']:.4f}",
                f"{row['questions']:,}",
            )
            for row in rows
        ]
        console.print(table(str(run), columns, lines))
    for task, figures in more.items():
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        console.print(f"{task}  {shown}", markup=False)


def _refuse_options(
    names: list[str], shots: int | None, folder: Path | None, processes: int | None
) -> None:
    """Refuse options without effect, more processes than the machine can run, unknown tasks."""
    from pipeline.tasks.harness import refuse_unknown

    for name in names:
        # The name of a task of lm-eval has neither of the two.
        if "/" in name or name.endswith((".jsonl", ".gz")):
            raise ConfigError(f"--tasks {name}: no such file; check the path")
        if not name or Path(name).is_dir():
            raise ConfigError(
                f"--tasks {name!r} is no file of questions; give one, or a task's name"
            )
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-dir {folder} is not a directory; give one with YAML files")
    for option, value in (("shots", shots), ("task-dir", folder)):
        if value is not None and not names:
            raise ConfigError(f"--{option} {value} is for tasks of lm-eval; remove it")
    most = max(MOST_PROCESSES, os.cpu_count() or 1)
    if processes is not None and processes > most:
        raise ConfigError(f"--nproc {processes} is too many for this machine; use at most {most}")
    refuse_unknown(names, folder)


def _rows(task: "Task", reader: "Reader", pieces: "Tokenizer") -> list[dict[str, float | str]]:
    """The task as the mean over its parts, and the parts if there are several."""
    from pipeline.tasks.likelihood import pairs_of, score_parts
    from pipeline.tasks.questions import mean

    parts = score_parts(task, reader.score(pairs_of(task, pieces)))
    named = {task.name: mean(parts.values())}
    if len(parts) > 1:
        named |= {f"{task.name}/{part}": score for part, score in parts.items()}
    return [{"task": name, **score._asdict()} for name, score in named.items()]
