"""Translation pairs: prepared from columns, packed into rows, the same for any number of ranks."""

import json
from itertools import permutations

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.objective import Masked, Pairs
from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import PAIR
from pipeline.data.loader import Loader
from pipeline.data.pairs import PairRows, pack_pairs
from pipeline.data.prepare import prepare
from pipeline.objective.noise import IGNORE, Vocabulary, make_noise
from tests.data.conftest import make, recipe_for, refused, token_lists
from tests.data.test_loader import check_ranks

LANGUAGES = ("en", "de", "fr")
EOD = 2


def shard_of(documents: list[list[int]]) -> np.ndarray:
    """Write documents with these numbers of tokens per part; each token is the number of its part."""
    parts = [length for document in documents for length in document]
    return np.concatenate([[*[10 + i] * n, EOD] for i, n in enumerate(parts)]).astype(np.uint16)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=30),
    st.integers(2, 14),
    st.integers(2, 14),
    st.sampled_from(["first", "every"]),
)
def test_each_pair_that_fits_is_in_one_row(documents, seq, source_seq, directions) -> None:
    objective = Pairs(directions=directions, languages=LANGUAGES)
    packed = pack_pairs(shard_of(documents), EOD, PairRows(seq, source_seq, objective))
    order = list(permutations(range(3), 2)) if directions == "every" else [(0, 1)]
    wanted = [(3 * d + i, 3 * d + j) for i, j in order for d in range(len(documents))]
    length = [n for document in documents for n in document]
    wanted = [pair for pair in wanted if length[pair[0]] and length[pair[1]]]
    tag = int(directions == "every")
    fits = [p for p in wanted if length[p[0]] + 1 + tag <= source_seq and length[p[1]] + 1 <= seq]
    assert list(zip(packed.sources_N.tolist(), packed.targets_N.tolist(), strict=True)) == fits
    assert packed.left_out == len(wanted) - len(fits)
    rows = [fits[a:b] for a, b in zip(packed.rows[:-1], packed.rows[1:], strict=True)]
    assert [pair for row in rows for pair in row] == fits and all(rows)
    used = [
        (sum(length[s] + 1 + tag for s, _ in r), sum(length[t] + 1 for _, t in r)) for r in rows
    ]
    assert all(source <= source_seq and target <= seq for source, target in used)
    for row, after in zip(used, rows[1:], strict=False):  # the next pair had no space
        source, target = after[0]
        full = row[0] + length[source] + 1 + tag > source_seq
        assert full or row[1] + length[target] + 1 > seq


def sentence(number: int, language: str) -> str:
    return f"{language} {number} " + "wort " * (number % 7)


@pytest.fixture(scope="module")
def triples(ray_cluster, tokenizer, tmp_path_factory) -> tuple[Corpus, list[dict]]:
    """Write a file of each kind. Some rows have only two languages, and some cannot be used."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{name: sentence(i, name) for name in LANGUAGES} for i in range(300)]
    for row in rows[::10]:
        row["de"] = None
    junk = [{"en": "alone", "de": " "}, {"en": "a", "fr": f"b{PAIR}c"}, {"en": 3, "de": "drei"}]
    lines = [*rows[:150], *junk, rows[0]]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    table = pyarrow.table({name: [row[name] for row in rows[150:]] for name in LANGUAGES})
    pyarrow.parquet.write_table(table, folder / "b.parquet")
    sources = [folder / "a.jsonl", folder / "b.parquet"]
    more = {"pairs": LANGUAGES, "valid_share": 0.2, "dedup": {"exact": True}}
    recipe = recipe_for(sources, tokenizer, **more)
    prepare(recipe, folder / "out", model=tokenizer.model, malformed_share=0.1)
    return Corpus.open(folder / "out", verify=True), rows


def test_a_document_has_a_part_for_each_column(triples, tokenizer) -> None:
    corpus, rows = triples
    assert corpus.manifest.pairs == LANGUAGES
    found = [*_texts(corpus, "train", tokenizer), *_texts(corpus, "valid", tokenizer)]
    assert set(found) == {tuple(row[name] or "" for name in LANGUAGES) for row in rows}
    assert all(corpus.split(split).documents > 20 for split in ("train", "valid"))
    dropped = {s.name: {k: n for k, (n, _) in s.dropped.items()} for s in corpus.manifest.stages}
    assert dropped["read"] == {"empty side": 1, "malformed": 2}
    assert sum(dropped["dedup"].values()) == 1


def loader_of(corpus: Corpus, split: str, seed: int = 3, **settings: object) -> Loader:
    objective = Pairs(directions="every", languages=LANGUAGES, **settings)
    info = corpus.manifest.tokenizer
    noise = make_noise(objective, Vocabulary(info.vocab, info.eod), 48)
    rows = PairRows(40, 48, objective)
    return Loader(corpus, split, seq=88, rows=12, seed=seed, noise=noise, pairs=rows)


def test_an_epoch_has_every_pair_in_every_direction_once(triples, tokenizer) -> None:
    corpus, rows = triples
    loader = loader_of(corpus, "train")
    found = []
    batches = [loader.batch(step) for step in range(-(-loader.windows // 12))]
    names = ("tokens_BS", "targets_BS", "documents_BS", "source_BE", "source_documents_BE")
    columns = [torch.cat([b.inputs[name] for b in batches])[: loader.windows] for name in names]
    for row in zip(*(column.numpy() for column in columns), strict=True):
        tokens, targets, documents, source, source_documents = row
        for number in range(source_documents.max()):
            text = source[source_documents == number]
            here = (documents == number) & (targets != IGNORE)
            start, *before = tokens[here].tolist()
            *written, end = targets[here].tolist()
            assert before == written and end == text[-1] == tokenizer.eod
            languages = (LANGUAGES[i - tokenizer.vocab] for i in (int(text[0]), start))
            texts = (tokenizer.decode(ids) for ids in (text[1:-1].tolist(), written))
            found.append((*languages, *texts))
    trained = {PAIR.join(parts) for parts in _texts(corpus, "train", tokenizer)}
    wanted = []
    for row in rows:
        if PAIR.join(row[name] or "" for name in LANGUAGES) in trained:
            there = [name for name in LANGUAGES if row[name]]
            wanted += [(a, b, row[a], row[b]) for a, b in permutations(there, 2)]
    assert sorted(found) == sorted(wanted)


def _texts(corpus: Corpus, split: str, tokenizer) -> list[tuple[str, ...]]:
    documents = [np.array(ids) for ids in token_lists(corpus, split)]
    cut = [np.split(ids, np.flatnonzero(ids == tokenizer.eod) + 1)[:-1] for ids in documents]
    return [tuple(tokenizer.decode(part[:-1].tolist()) for part in parts) for parts in cut]


def test_ranks_split_the_same_batch_and_held_out_rows_stay(triples) -> None:
    corpus, _ = triples
    check_ranks(lambda: loader_of(corpus, "train"), 3, (0, 5, 10**6))
    first = loader_of(corpus, "train").batch(0)
    assert first.hash != loader_of(corpus, "train", seed=4).batch(0).hash
    valid = loader_of(corpus, "valid")
    rows = sorted(map(tuple, valid.batch(0).targets_BS.tolist()))
    assert valid.windows >= 12 and len({*rows}) == 12
    again = loader_of(corpus, "valid", smoothing=0.1)
    assert again.batch(0).hash == valid.batch(0).hash


def test_what_data_cannot_serve_is_one_line(triples, corpus, tmp_path, tokenizer) -> None:
    pairs, _ = triples
    with refused("prepare data with --pairs"):
        corpus.check_pairs(Pairs())
    with refused("has pairs of en, de, fr"):
        pairs.check_pairs(Masked())
    with refused("prepare it with --pairs de,en"):
        pairs.check_pairs(Pairs(languages=("de", "en")))
    with refused("model.source_seq=3"):
        Loader(
            pairs, "valid", seq=6, rows=2, seed=0, pairs=PairRows(3, 3, Pairs(languages=LANGUAGES))
        )
    (tmp_path / "a.txt").write_text("text")
    with refused("has no columns"):
        make([tmp_path / "a.txt"], tmp_path / "out", tokenizer, pairs=("en", "de"))
    pyarrow.parquet.write_table(pyarrow.table({"en": ["a"]}), tmp_path / "b.parquet")
    with refused("choose from en"):
        make([tmp_path / "b.parquet"], tmp_path / "out", tokenizer, pairs=("en", "de"))
