"""How far MLflow has got with one run: `mlflow.json` in the run directory.

The watermark is the training step, not a place in the file: a resumed run writes the steps past its checkpoint again,
and those MLflow already has are passed over. Events carry no such number, theirs is their time.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pipeline.atomic import replace

FILE = "mlflow.json"


@dataclass
class State:
    id: str = field(
        default_factory=lambda: uuid.uuid4().hex
    )  # the run's tag there: found again if run_id is lost
    uri: str = ""  # without user or password
    experiment: str = ""
    run_id: str = ""
    sent: dict[str, float] = field(default_factory=dict)  # kind → highest step, or time for events
    sending: bool = False  # a batch is on its way: after a crash, ask the server what it has
    restarts: int = 0
    status: str = ""
    described: str = ""  # digest of the files that params, tags and artifacts were last made from


def fresh(record: Mapping[str, object], sent: Mapping[str, float]) -> bool:
    mark = watermark(record)
    return mark is not None and mark[1] > sent.get(mark[0], float("-inf"))


def advance(record: Mapping[str, object], sent: dict[str, float]) -> None:
    mark = watermark(record)
    if mark is not None:
        sent[mark[0]] = max(mark[1], sent.get(mark[0], float("-inf")))


def watermark(record: Mapping[str, object]) -> tuple[str, float] | None:
    """(kind, number) by which a record is known to have been sent; None if it is none of ours."""
    kind = record.get("kind")
    number = record.get("time" if kind == "event" else "step")
    return (kind, number) if isinstance(kind, str) and isinstance(number, int | float) else None


def load(run_dir: Path) -> State:
    """The stored state, or a new one: a lost or damaged file costs a question to the server, not a record."""
    try:
        stored = json.loads((run_dir / FILE).read_bytes())
        return State(**{f.name: stored[f.name] for f in fields(State) if f.name in stored})
    except (FileNotFoundError, ValueError, TypeError):
        return State()


def save(run_dir: Path, state: State) -> None:
    replace(run_dir / FILE, json.dumps(asdict(state), indent=1).encode() + b"\n")
