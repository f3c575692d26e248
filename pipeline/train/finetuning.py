"""Fine-tuning as an ordinary run: the examples of a file become its corpus, and the file and the
pretrained run determine its objective, length and learning rates."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from pipeline import atomic
from pipeline.checkpoint.restore import run_config, starting_point
from pipeline.config.objective import Answers, Labels
from pipeline.config.optimizer import AdamW
from pipeline.config.parts import Learned
from pipeline.config.schema import RunConfig
from pipeline.data import rows
from pipeline.errors import ConfigError, DataError, RunError
from pipeline.planner.count import params
from pipeline.planner.rates import adamw_peak
from pipeline.runs.directory import ROWS, RunDir, tokenizer_of

# As for GPT (Radford et al. 2018): three epochs in small batches, at a quarter of the peak rate of
# pretraining (6.25e-5 of 2.5e-4), decayed to zero. BERT's are similar (arXiv 1810.04805, A.3).
RATE_SHARE = 0.25
LORA_RATE = 10  # factor of the rate with LoRA (Schulman et al. 2025, "LoRA Without Regret")
# Tokens per parameter of an imported model. Llama 3 8B has 1,900; with the rule of AdamW this gives
# 6e-5 for GPT-2 (GPT: 6.25e-5) and 1.5e-5 for 7B (Llama 2: 2e-5).
PUBLISHED_TOKENS = 2000
WARMUP_SHARE = 0.06  # share of the steps (RoBERTa: arXiv 1907.11692, table 10)
DECAY = 0.01  # weight decay, as for GPT and BERT
BATCH = 32  # examples per step by default, also if there are fewer


@dataclass(frozen=True, slots=True)
class FineTuning:
    """The user's options. None leaves a value to the file and the run."""

    start: Path  # the run or checkpoint with the weights
    data: Path
    valid: Path | None
    valid_share: float
    seq: int | None
    batch: int
    epochs: float
    lr: float | None
    regression: bool
    lm_weight: float | None
    lora: int | None  # rank
    scratch: bool  # start from new random weights instead
    tokenizer: Path | None


class Prepared(NamedTuple):
    rows: Path  # the corpus
    defaults: dict[str, Any]  # settings, below those that the user gives
    note: str  # for the user: a description of the examples


def prepare(asked: FineTuning, out: Path) -> Prepared:
    """Write the corpus of a run into its directory; refuse an unsuitable file or run."""
    corpus = out / ROWS
    if RunDir(out).exists:
        remedy = "give another --out"
        if corpus.exists():  # otherwise it is a run of `launch pretrain`
            remedy = (
                f"continue it with `launch finetune --resume --out {quote(str(out))}`, or {remedy}"
            )
        raise RunError(f"--out {out} already contains a run; {remedy}")
    # Never deleted here: it may be the user's own, or belong to a process that is starting a run.
    if os.path.lexists(corpus):
        raise RunError(f"{corpus} exists without a run; remove it, or give another --out")
    every = rows.read_examples(asked.data)
    if asked.valid is None:
        train, valid = rows.split_examples(every, asked.valid_share)
    else:
        train = every
        valid = rows.read_examples(asked.valid)
    if (train[0].label is None) != (valid[0].label is None):
        text = f"--valid {asked.valid} has another form than --data {asked.data}"
        raise DataError(f"{text}; give both files the same keys")
    if asked.batch > max(BATCH, len(train)):
        text = f"--batch {asked.batch} is more than the {len(train)} examples to train on"
        raise ConfigError(f"{text}; lower it")
    if asked.scratch and asked.lora is not None:
        text = f"--lora {asked.lora} keeps the weights, and --scratch makes them random"
        raise ConfigError(f"{text}; remove one of the two")
    starting_point(asked.start)  # only for its refusals, such as of adapters
    before = run_config(asked.start)
    objective = _objective(asked, before, train, valid)
    tokenizer = tokenizer_of(asked.start, before.data.dir, asked.tokenizer)
    encoded = {
        "train": rows.encode_examples(train, objective, tokenizer),
        "valid": rows.encode_examples(valid, objective, tokenizer),
    }
    seq = _length(asked, before)
    if not isinstance(before.model.position, Learned):  # a learned table keeps its length
        seq = rows.row_length([*encoded["train"], *encoded["valid"]], objective, seq)
    defaults = _defaults(asked, before, objective, seq, len(train), len(valid))
    try:
        with atomic.directory(corpus) as temporary:
            cut = rows.write_rows(temporary, encoded, objective, seq, asked.batch, tokenizer)
    except OSError as error:
        text = f"--out {out} cannot be written: {error.strerror}"
        raise RunError(f"{text}; choose another directory") from None
    note = f"{len(train):,} examples to train on, {len(valid):,} held out, rows of {seq} tokens"
    if isinstance(objective, Labels):
        note += f", {len(objective.names)} classes" if objective.names else ", labels are numbers"
    trained = before.model.longest
    if seq > trained and not asked.scratch:
        note += f"\nwarning: --seq {asked.seq} makes rows of {seq:,} tokens, and the run was "
        note += f"trained on {trained:,}; lower it to {trained} unless your texts need more"
    if cut:
        note += f"\nwarning: {cut:,} examples are longer than a row and were cut"
    known = {(row.first, row.second) for row in train}
    both = sum((row.first, row.second) in known for row in valid)
    if both:
        note += f"\nwarning: {both:,} held-out examples are also training examples"
    return Prepared(corpus, defaults, note)


def _objective(
    asked: FineTuning, before: RunConfig, train: list[rows.Example], valid: list[rows.Example]
) -> Answers | Labels:
    stack = before.model.stack
    labeled = train[0].label is not None
    if stack == "encoder-decoder" or (stack == "encoder" and not labeled):
        what = "labels" if labeled else "answers"
        needs = "an encoder or a decoder" if labeled else "a decoder"
        raise ConfigError(f'{asked.start} has model.stack="{stack}"; {what} need {needs}; give one')
    for option, given in (("regression", asked.regression), ("lm-weight", asked.lm_weight)):
        if given and not labeled:
            raise ConfigError(f"--{option} is for labels, but {asked.data} has answers; remove it")
    if not labeled:
        return Answers()
    weight = asked.lm_weight or 0.0
    if weight and stack == "encoder":
        text = f"--lm-weight {weight} needs a decoder: an encoder sees the tokens to predict"
        raise ConfigError(f"{text}; remove it")
    # Only the file of --data decides, because its labels are learned.
    examples = train if asked.valid else [*train, *valid]
    numbers = asked.regression or any(isinstance(row.label, float) for row in examples)
    return Labels(
        names=rows.label_names(train, valid, numbers),
        reads="first" if stack == "encoder" else "last",
        lm_weight=weight,
        special=before.objective.special_ids,
    )


def _length(asked: FineTuning, before: RunConfig) -> int:
    """Return the longest row that the user and the model allow."""
    longest = before.model.longest
    if asked.seq is None or asked.seq == longest:
        return longest
    if isinstance(before.model.position, Learned):
        text = f"--seq {asked.seq}: the model has {longest} learned positions"
        raise ConfigError(f"{text}, and its rows need as many tokens; remove it")
    return asked.seq


def _defaults(
    asked: FineTuning,
    before: RunConfig,
    objective: Answers | Labels,
    seq: int,
    train: int,
    valid: int,
) -> dict[str, Any]:
    steps = max(1, math.ceil(asked.epochs * train / asked.batch))
    # The rows are as short as the examples; the model still reads as much as before.
    longest = before.model.longest
    context = None if asked.scratch or longest <= seq else longest
    model: dict[str, Any] = {"seq": seq, "context": context}
    model |= {"row_classes": 0, "generator": None}
    if isinstance(objective, Labels):
        # No multi-token prediction.
        model |= {"row_classes": objective.classes, "mtp": 0}
    rate = RATE_SHARE * _peak_rate(before) * (1 if asked.lora is None else LORA_RATE)
    return {
        **({"init": None} if asked.scratch else {}),
        "experiment": "finetune",
        "objective": objective.model_dump(),
        "lora": None if asked.lora is None else {"rank": asked.lora},
        "model": model,
        "train": {
            "steps": steps,
            "batch_tokens": asked.batch * seq,
            "eval_every": max(1, round(train / asked.batch)),  # once per epoch
            "eval_batches": math.ceil(valid / asked.batch),
        },
        "optim": {
            "lr": rate if asked.lr is None else asked.lr,
            "optimizer": {"decay": DECAY},
            "schedule": {
                "kind": "wsd",
                "warmup_steps": math.ceil(WARMUP_SHARE * steps),
                "decay_share": 1.0,
                "decay_shape": "linear",
                "final_share": 0.0,
            },
        },
    }


def _peak_rate(before: RunConfig) -> float:
    """Return the peak rate of the run's pretraining with AdamW; for a run with Muon, by rule."""
    count = params(before.model)
    if before.data.dir is None:  # an import, whose training is unknown
        return adamw_peak(before.model, count, PUBLISHED_TOKENS * count.scaling).value
    if isinstance(before.optim.optimizer, AdamW):
        # The rate of a run that was itself fine-tuned is already a quarter.
        return before.optim.lr / (RATE_SHARE if before.objective.examples else 1)
    # The rate is that of a whole run, even if this one was short.
    tokens = max(before.train.steps * before.train.batch_tokens, 20 * count.scaling)
    return adamw_peak(before.model, count, tokens).value
