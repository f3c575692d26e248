"""EleutherAI's lm-eval on our checkpoints, without an export. It is an optional extra."""

import fnmatch
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pipeline.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer
    from pipeline.tasks.answering import Reader

MAX_NEW = 256  # tokens that a task generates by default, as in lm-eval
OFFLINE = "HF_HUB_OFFLINE"  # Hugging Face's libraries read it when they are imported
CONNECT_S = 5.0
LARGEST_FILE = 2**20  # of a task's YAML file; a larger one is something else
_KEYS = (b"task", b"group", b"tag")
INSTALL = (
    "lm-eval is not installed; run `pip install 'isoflop[tasks]'`, or `pip install -e '.[tasks]'` "
    "in a checkout"
)


def refuse_unknown(names: Sequence[str], folder: Path | None) -> None:
    """Refuse tasks that no file of lm-eval lists, before anything large is imported.

    lm-eval itself takes a minute to find that out; it still checks the names that pass.
    """
    spec = find_spec("lm_eval")
    if names and spec is None:
        raise ConfigError(f"--tasks {', '.join(names)}: {INSTALL}")
    unknown = set(names)
    own = _files(folder) if folder else ()
    for path in chain(own, _shipped()) if unknown else ():
        text = path.read_bytes()
        unknown = {name for name in unknown if not _lists(text, name)}
        if not unknown:
            return
    if unknown:
        raise _no_task(sorted(unknown))


def _shipped() -> Iterator[Path]:
    """Yield the files of lm-eval's own tasks."""
    spec = find_spec("lm_eval")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from _files(Path(root, "tasks"))


def _files(folder: Path) -> Iterator[Path]:
    """Yield YAML files and those that they include, such as `gpqa_yaml`, which may name a tag."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        may_list = path.suffix in ("", ".yaml") and not hidden and path.is_file()
        if may_list and path.stat().st_size < LARGEST_FILE:
            yield path


def _lists(text: bytes, name: str) -> bool:
    """Whether a line has a task, group, tag or item of a list that this name or pattern matches."""
    pattern = os.fsencode(name)  # a shell passes any bytes
    start = re.split(rb"[*?[]", pattern)[0]
    if start not in text:  # a fast test, because there are 14,000 files
        return False
    for line in text.splitlines():
        if start in line:
            plain = line.partition(b"#")[0].translate(None, b" \t[]'\"")
            key, colon, value = plain.removeprefix(b"-").partition(b":")
            listed = not colon or key in _KEYS
            if listed and fnmatch.filter((value if colon else key).split(b","), pattern):
                return True
    return False


def _directories(names: Sequence[str]) -> list[Path]:
    """Return the directories of lm-eval's files that define these tasks."""
    defined = b"|".join(re.escape(os.fsencode(name)) for name in names)
    line = re.compile(rb"^task: *(%b)\s*$" % defined, re.MULTILINE)
    return sorted({path.parent for path in _shipped() if line.search(path.read_bytes())})


def _no_task(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"--tasks {', '.join(names)}: neither a file nor a task of lm-eval; "
        "`lm-eval ls tasks` lists them, and --task-dir adds yours"
    )


def evaluate(
    names: Sequence[str],
    reader: "Reader",
    tokenizer: "Tokenizer",
    *,
    folder: Path | None = None,
    questions: int | None = None,
    shots: int | None = None,
) -> dict[str, dict[str, float]]:
    """Return lm-eval's figures for each task, by metric. `folder` has more tasks as YAML files."""
    stay_offline()
    import lm_eval
    from lm_eval.tasks import TaskManager

    # Reading lm-eval's own tasks takes 14 s, and few tasks need more than their own directory. A
    # group may use all of them.
    few = [folder] if folder else _directories(names)
    manager = TaskManager(include_path=few, include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=folder)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise _no_task(unknown)
    try:
        found = lm_eval.simple_evaluate(
            _adapter(reader, tokenizer),
            tasks=manager.match_tasks(list(names)),  # a name may be a pattern
            num_fewshot=shots,
            limit=questions,
            task_manager=manager,
            log_samples=False,
            verbosity="ERROR",
        )
    except OSError as error:  # no network, or a file that does not exist
        reason = first_line(error)
        text = f"--tasks {', '.join(names)}: the questions cannot be loaded ({reason})"
        raise DataError(f"{text}; load them once with network access, or check the file") from None
    except Exception as error:
        # A task of the user fails inside of lm-eval; our own mistakes have a frame of the adapter.
        frames = extract_tb(error.__traceback__)[1:]
        if folder is None or any(frame.filename == __file__ for frame in frames):
            raise
        text = f"--tasks {', '.join(names)}: {type(error).__name__}: {first_line(error)}"
        raise DataError(f"{text}; correct the YAML file in {folder}") from None
    return {
        task: {
            # lm-eval appends the name of the filter; "none" is no filter.
            key.removesuffix(",none"): value
            for key, value in figures.items()
            if isinstance(value, int | float)
        }
        for task, figures in found["results"].items()
    }


def stay_offline() -> None:
    """Without a connection to the hub, use its local copies instead of retrying for a minute."""
    # Behind a proxy only the libraries can tell.
    if OFFLINE in os.environ or getproxies():
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    with suppress(ValueError):  # not an address; the libraries report it
        try:
            port = hub.port or {"http": 80}.get(hub.scheme, 443)
            socket.create_connection((hub.hostname or "", port), CONNECT_S).close()
        except OSError:
            os.environ[OFFLINE] = "1"


def _adapter(reader: "Reader", tokenizer: "Tokenizer") -> Any:
    # The class is defined here, because its base class needs lm-eval.
    from lm_eval.api.model import TemplateLM

    from pipeline.tasks.likelihood import Pair, encode_pair

    class Adapter(TemplateLM):  # type: ignore[misc]
        @property
        def eot_token_id(self) -> int:
            return tokenizer.eod

        @property
        def tokenizer_name(self) -> str:
            return tokenizer.fingerprint

        def tok_encode(self, string: str, *_: object, **__: object) -> list[int]:
            ids: list[int] = tokenizer.encode(string).tolist()
            return ids

        def _loglikelihood_tokens(self, requests: Any, **_: object) -> list[tuple[float, bool]]:
            pairs = [
                # Without tokens for either, lm-eval's own backend stops; an empty text has none.
                Pair(tuple(context), tuple(answer))
                if context and (answer or not texts[1])
                else encode_pair(tokenizer, *texts)
                for texts, context, answer in requests
            ]
            return [(each.nats, each.greedy) for each in reader.score(pairs)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Return the likelihood of whole texts, in windows that predict each token once."""
            texts = [self.tok_encode(request.args[0]) for request in requests]
            found = reader.score([Pair((tokenizer.eod,), tuple(text)) for text in texts])
            return [each.nats for each in found]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            """Return greedy continuations, each cut before the first of its stop texts."""
            texts = [""] * len(requests)
            lengths = {request.args[1].get("max_gen_toks", MAX_NEW) for request in requests}
            for most in sorted(lengths):
                numbers = [
                    number
                    for number, request in enumerate(requests)
                    if request.args[1].get("max_gen_toks", MAX_NEW) == most
                ]
                left = max(1, reader.longest - most)
                prompts = [self.tok_encode(requests[n].args[0])[-left:] for n in numbers]
                prompts = [prompt or [tokenizer.eod] for prompt in prompts]
                found = reader.generate(prompts, most, tokenizer.eod)
                for number, tokens in zip(numbers, found, strict=True):
                    ended = tokens[-1:] == [tokenizer.eod]
                    text = tokenizer.decode(tokens[:-1] if ended else tokens)
                    texts[number] = _until(text, requests[number].args[1].get("until", ()))
            return texts

    return Adapter()


def _until(text: str, stops: str | Sequence[str]) -> str:
    for stop in [stops] if isinstance(stops, str) else stops:
        if stop:
            text = text.partition(stop)[0]
    return text
