"""Options that several commands share, each defined once as an annotated type.

A command writes `as_json: AsJson = False`, so each command has its own default. A help text has a
variable if its option would not fit on one line.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from pipeline.errors import ConfigError
from pipeline.units import parse_count


def parse_path(text: str) -> Path:
    """Parse a path option; refuse an empty one."""
    # An unset shell variable gives "", and Path("") would be the current directory.
    if not text.strip():
        raise typer.BadParameter("the path is empty; give a name")
    return Path(text)


def parse_output(text: str) -> Path:
    """Parse the path of a directory or file to write; refuse one that cannot be created."""
    from pipeline.runs.log import printable

    path = parse_path(text)
    for link in (path, *path.parents):
        with contextlib.suppress(OSError):  # a name that is too long is reported when it is used
            if link.is_symlink() and not link.exists():
                target = printable(link.readlink())
                problem = f"{printable(link)} is a link to {target}, which does not exist"
                raise ConfigError(f"{problem}; create that directory or give another path")
    return path


def parse_amount(text: str) -> float:
    """Parse a number of tokens or parameters, such as 1e9, 1B or 285M."""
    with contextlib.suppress(ValueError):
        return parse_count(text) or float(text)
    raise typer.BadParameter(f"{text} is not a number; write it as 285e6 or 285M")


def amount_option(text: str) -> Any:
    """Return the declaration of an option that is a number of tokens or parameters."""
    return Option(parser=parse_amount, metavar="NUMBER", help=text)


def path_option(*names: str, text: str) -> Any:
    """Return the declaration of an option that is a path to read."""
    return Option(*names, parser=parse_path, metavar="PATH", help=text)


def output_option(*names: str, text: str) -> Any:
    """Return the declaration of an option that is a path to write."""
    return Option(*names, parser=parse_output, metavar="PATH", help=text)


def given_only(table: dict[str, Any]) -> dict[str, Any]:
    """Remove options that were not given, which must not override the config file or cluster."""
    inner = {k: given_only(v) if isinstance(v, dict) else v for k, v in table.items()}
    return {key: value for key, value in inner.items() if value not in (None, {})}


AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print no progress.")]

# What to train or to measure.
Size = Annotated[str, Option(help="Model size; `launch show --sizes` lists all of them.")]
_ARCH = "Architecture, a name in configs/arch (default: dense, or the size's own)."
Arch = Annotated[str | None, Option(help=_ARCH)]
_RECIPE = "Training recipe, a name in configs/recipe (default: the architecture's, or adamw)."
Recipe = Annotated[str | None, Option(help=_RECIPE)]
Cluster = Annotated[str | None, Option(help="Cluster, a name in configs/cluster or a TOML file.")]
ConfigFile = Annotated[Path | None, Option("--config", help="TOML file with settings of the run.")]
_SETTINGS = "One setting as KEY=VALUE, which overrides all other sources. Repeatable."
Settings = Annotated[list[str] | None, Option("--set", help=_SETTINGS)]

# The length of a run; at most one of these.
Steps = Annotated[int | None, Option(help="Run length in optimizer steps.")]
_TOKENS = "Run length in tokens, such as 285M (default: 20 per parameter)."
Tokens = Annotated[float | None, amount_option(_TOKENS)]
Flops = Annotated[float | None, Option(help="Run length in training FLOPs, such as 1e18.")]

# A trained run.
RunPath = Annotated[Path, Option("--run", help="Run directory, or one checkpoint directory in it.")]
_TOKENIZER_FILE = "SentencePiece model, if it is not in the run's data directory."
TokenizerFile = Annotated[Path | None, Option("--tokenizer", help=_TOKENIZER_FILE)]

# Where runs or points are read from, and the law fitted to them.
_RUNS_DIR = "Directory of runs, such as runs/demo."
RunsDir = Annotated[Path | None, path_option("--runs", text=_RUNS_DIR)]
_EXPERIMENT = "Experiment: the runs in runs/NAME if there are any, otherwise those in MLflow."
Experiment = Annotated[str | None, Option(help=_EXPERIMENT)]
_POINTS_FILE = "CSV with columns N, D, loss (optional: C, run, experts, unique, vocab, convention)."
PointsFile = Annotated[Path | None, path_option("--points", text=_POINTS_FILE)]
_LAW = (
    "Law to fit: auto, chinchilla, gamma, kaplan, isoflop, parabola, envelope, vpnls, moe, "
    "data-constrained, compute or power (docs/SCALING.md)."
)
Law = Annotated[str, Option(help=_LAW)]
_CURVES = "Also use held-out losses before the decay, lowered by what the decay gains."
Curves = Annotated[bool, Option("--curves", help=_CURVES)]
DropHighest = Annotated[int, Option(help="Leave out this many of the largest losses.", min=0)]


def examples(*lines: str) -> str:
    """Return the examples of a command's help, one per line."""
    return "Examples:\n\n" + "\n".join(lines)
