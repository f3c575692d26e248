"""Task files: JSON lines with questions that a language model answers by likelihood.

A line has one of three forms, and optionally a `task`, the part of the file that it belongs to:

    {"good": "The cats sleep.", "bad": "The cats sleeps."}                    a minimal pair
    {"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}               a multiple choice
    {"prompt": "The capital of France is", "continuation": " Paris"}          a continuation

A file may be compressed with gzip. Its name, without the extension, is the name of the task.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.data.json_lines import Line, read_lines, shown
from pipeline.errors import DataError

_FORMS = "good and bad; or prompt, choices and answer; or prompt and continuation"


class Question(NamedTuple):
    part: str  # of the task
    prompt: str
    answers: tuple[str, ...]  # a single answer is a continuation that the model must produce
    right: int  # which answer is right


class Task(NamedTuple):
    name: str
    questions: tuple[Question, ...]

    @property
    def chance(self) -> float:
        """The accuracy of guessing; for a continuation it is zero."""
        parts: dict[str, list[float]] = defaultdict(list)
        for question in self.questions:
            answers = len(question.answers)
            parts[question.part].append(1 / answers if answers > 1 else 0.0)
        # As in `mean`, each part counts the same.
        return sum(sum(part) / len(part) for part in parts.values()) / len(parts)

    def sample(self, most: int | None) -> "Task":
        """Return this many questions, evenly spread over the parts and within each.

        There is at least one of every part, and small parts leave their share to the others."""
        if most is None or most >= len(self.questions):
            return self
        parts: dict[str, list[Question]] = defaultdict(list)
        for question in self.questions:
            parts[question.part].append(question)
        sizes = [len(questions) for questions in parts.values()]

        def total(each: int) -> int:
            return sum(min(size, each) for size in sizes)

        # The largest number per part that is not too many in total.
        each = max(1, bisect_right(range(1, most + 1), most, key=total))
        rest = max(0, most - total(each))
        larger = sum(size > each for size in sizes)
        chosen: list[Question] = []
        index = 0
        for questions in parts.values():
            wanted = min(each, len(questions))
            if len(questions) > each:
                # If the number does not divide evenly, evenly spaced parts get one question more.
                wanted += rest * (index + 1) // larger - rest * index // larger
                index += 1
            chosen += [questions[i * len(questions) // wanted] for i in range(wanted)]
        return Task(self.name, tuple(chosen))


def read_tasks(files: Sequence[str | Path]) -> list[Task]:
    tasks = [read_task(Path(file)) for file in files]
    names = [task.name for task in tasks]
    if twice := {name for name in names if names.count(name) > 1}:
        remedy = "rename one of them, or give each file once"
        raise DataError(f"two task files are named {', '.join(sorted(twice))}; {remedy}")
    return tasks


def read_task(path: Path) -> Task:
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json") or path.name
    questions = [_question(line, name) for line in read_lines(path, _FORMS)]
    return Task(name, tuple(questions))


def _question(line: Line, name: str) -> Question:
    part = line.text("task") if "task" in line.fields else name
    # The first check is for pairs with a prompt, which would be ignored.
    for form in (("good", "prompt"), ("good", "choices", "continuation")):
        found = [key for key in form if key in line.fields]
        if len(found) > 1:
            raise line.error(f"{found[0]} and {found[1]} are of two forms")
    if "good" in line.fields or "bad" in line.fields:
        # BLiMP has a pair of equal texts. As in lm-eval, a tie is right.
        return Question(part, "", (line.text("good"), line.text("bad")), 0)
    prompt = line.text("prompt", empty=True)
    if "continuation" in line.fields:
        return Question(part, prompt, (line.text("continuation"),), 0)
    choices = line.fields.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        raise line.error(f"choices={shown(choices)} is not a list of two or more texts")
    answers = tuple(line.check("choices", choice) for choice in choices)
    right = line.fields.get("answer")
    if type(right) is not int or not 0 <= right < len(answers):
        raise line.error(f"answer={shown(right)} is not the number of a choice, counted from 0")
    return Question(part, prompt, answers, right)


class Score(NamedTuple):
    """How a model does on a task or a part of it."""

    accuracy: float
    accuracy_per_byte: float  # choosing by likelihood per byte, which does not favor short answers
    bits_per_byte: float  # bits per byte of the right answers
    questions: int


def mean(scores: Iterable[Score]) -> Score:
    """Return the mean over parts, as published for BLiMP: each part counts the same."""
    accuracy, per_byte, bits, questions = zip(*scores, strict=True)
    count = len(questions)
    return Score(sum(accuracy) / count, sum(per_byte) / count, sum(bits) / count, sum(questions))
