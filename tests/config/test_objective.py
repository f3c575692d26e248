"""Objectives as settings: what an architecture names, what a vocabulary needs, what is refused."""

from pathlib import Path

import pytest

from pipeline.config.dump import to_toml
from pipeline.config.layers import load, reload
from pipeline.config.objective import Causal, Masked, Spans, padded_vocab
from pipeline.errors import ConfigError, DataError
from pipeline.planner.check import resolve
from pipeline.runs.directory import facts
from pipeline.runs.history import read_runs
from pipeline.scaling.points import points_of
from tests.scaling.made_runs import make_run

ENCODER = ("model.stack=encoder", "objective.kind=masked")


def test_a_decoder_predicts_the_next_token_and_old_runs_name_no_objective(tmp_path: Path) -> None:
    config = resolve(load(size="tiny"), ranks=1, gpu=False)
    assert config.objective == Causal()
    text = to_toml(config)
    assert '[objective]\nkind = "causal"\n' in text
    (tmp_path / "config.toml").write_text(text.replace('[objective]\nkind = "causal"\n', ""))
    assert reload(tmp_path / "config.toml") == config


def test_settings_of_an_objective() -> None:
    spec = load(size="tiny", sets=[*ENCODER, "objective.rate=0.3"], pieces=512)
    assert spec.objective == Masked(rate=0.3)
    # Another kind starts from its own defaults.
    assert load(size="tiny", sets=[*ENCODER, "objective.kind=causal", "model.stack=decoder"]) == (
        load(size="tiny")
    )


def test_the_vocabulary_has_space_for_special_ids() -> None:
    assert [padded_vocab(pieces, Masked()) for pieces in (511, 512)] == [512, 576]
    assert padded_vocab(32_000, Spans()) == 32_128  # the number of T5
    assert load(size="tiny", pieces=512).model.vocab == 512
    assert load(size="tiny", sets=ENCODER, pieces=512).model.vocab == 576
    given = load(size="tiny", sets=[*ENCODER, "model.vocab=1024"], pieces=512)
    assert given.model.vocab == 1024


@pytest.mark.parametrize(
    ("sets", "key", "remedy"),
    [
        (["objective.kind=masked"], "model.stack", "objective.kind=causal"),
        (["objective.kind=spans"], "model.stack", "--arch t5"),
        (["model.stack=encoder"], "objective.kind", "objective.kind=masked"),
        ([*ENCODER[:1], "objective.kind=spans"], "encoder-decoder", "objective.kind=masked"),
        (["objective.kind=prefix", "data.packing=best-fit"], "data.packing", "remove"),
        (["objective.kind=prefix", "data.documents=true"], "data.documents", "remove"),
        (["objective.kind=mixture"], "model.stack", "--arch t5"),
        (
            ["objective.kind=mixture", 'objective.denoisers=[{mode="R",rate=0.8,length=3}]'],
            "objective.denoisers",
            "longer spans",
        ),
        (["objective.kind=prefix", "model.seq=1"], "model.seq=1", "at least 2"),
        (
            [*ENCODER, "objective.pairs=order", "model={seq=6,segments=2,row_classes=2}"],
            "model.seq=6",
            "at least 7",
        ),
        (
            [*ENCODER, "objective.pairs=next", "model={segments=1,row_classes=2}"],
            "objective.pairs",
            "model.segments=2",
        ),
        ([*ENCODER, "objective.mask=0.95"], "objective", "lower one"),
        ([*ENCODER, "objective.mask=0", "objective.random=0"], "mask=0 and random=0", "raise one"),
        ([*ENCODER, "model.seq=1"], "model.seq=1", "at least 2"),
        (["objective.kind=replaced"], "model.stack", "--arch electra"),
        (["model.row_classes=2"], "model.row_classes=2", "set model.row_classes=0"),
        (
            [*ENCODER, "objective={pairs='next',rate=0.6}", "model={segments=2,row_classes=2}"],
            "objective.rate=0.6",
            "at most 0.5",
        ),
        ([*ENCODER, "objective.rate=1.5"], "objective.rate=1.5", "less than 1"),
        ([*ENCODER, "objective.share=0.5"], "objective.share", "random"),
        (["objective.rate=0.3"], "objective.rate", "kind"),
        (["objective.kind=mask"], "objective", "'masked'"),
        (["objective=masked"], "objective", "kind"),
        (["model={stack='encoder-decoder',seq=1}", "objective.kind=denoise"], "seq=1", "least 2"),
        (["model.source_seq=64"], "source_seq=64", "remove source_seq"),
    ],
)
def test_unsupported_objectives_are_one_line_errors(sets: list[str], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(size="tiny", sets=sets, pieces=512)
    message = str(error.value)
    assert key in message and remedy in message and "\n" not in message


def test_a_law_never_mixes_objectives(tmp_path: Path) -> None:
    def named(*sets: str) -> object:
        config = resolve(load(size="tiny", sets=sets), ranks=1, gpu=False)
        return facts(config, tokenizer="", bytes_per_token=1.0, peak_flops=None).get("objective")

    assert named() is None  # records of older runs name no objective, either
    assert named(*ENCODER) == "masked"
    assert named(*ENCODER, "objective.rate=0.4") == "masked rate=0.4"
    for i, sets in enumerate(((), ENCODER, (*ENCODER, "objective.rate=0.4"))):
        more = {} if named(*sets) is None else {"objective": named(*sets)}
        make_run(tmp_path, f"run{i}", 1e6, 2e7, **more)
    runs = read_runs(tmp_path)
    for pair in (runs[:2], runs[1:]):
        with pytest.raises(DataError, match="objective="):
            points_of(pair)
