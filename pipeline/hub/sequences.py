"""Export models with labels as transformers' ...ForSequenceClassification.

B rows · S tokens · C classes
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from pipeline.config.objective import Labels
from pipeline.config.shape import Model
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError
from pipeline.hub.families import FAMILIES, Family, choose_family
from pipeline.model.head import IGNORED
from pipeline.model.stack import Decoder

SEQUENCES = "ForSequenceClassification"
# Tensors that a class for sequences does not have, by our names.
_TOKEN_HEAD = ("head.", "transform.")


def export_family(cfg: Model, labels: Labels | None) -> Family:
    """Return the family of a model. With labels, it is the family of the same model without labels,
    and its class is the one for sequences. A generator is not exported."""
    cfg = cfg.model_copy(update={"generator": None})
    if labels is None:
        return choose_family(cfg)
    # BERT's pretraining class has a row head with two classes.
    plain = 2 if cfg.stack == "encoder" else 0
    try:
        family = choose_family(cfg.model_copy(update={"row_classes": plain}))
    except ConfigError:
        family = choose_family(cfg.model_copy(update={"row_classes": 0}))
        if family.row_head:  # labels are possible, so the error names another unsupported setting
            raise
    if not family.row_head:
        known = ", ".join(dict.fromkeys(each.kind for each in FAMILIES if each.row_head))
        raise ConfigError(
            f"model.arch={cfg.arch} with labels has no counterpart in transformers that this "
            f"version exports; only models of the families {known} have"
        )
    architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[family.kind]
    return family.model_copy(update={"architecture": architecture})


def padding_id(tokenizer: Tokenizer) -> int:
    """Return a token for padding, but not the end of a text, which transformers would skip then."""
    return tokenizer.controls.get("<pad>", tokenizer.sentencepiece.unk_id())


def sequence_config(labels: Labels, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the keys of config.json about labels."""
    names = labels.names or ("LABEL_0",)
    kind = "single_label_classification" if labels.names else "regression"
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": kind,
        "pad_token_id": None if tokenizer is None else padding_id(tokenizer),
        "classifier_dropout": 0.0,
    }


def sequence_head(family: Family, ours: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the row head by its names in transformers; remove it and the token head from `ours`."""
    for key in [key for key in ours if key.startswith(_TOKEN_HEAD)]:
        del ours[key]
    for part in ("weight", "bias"):
        if f"row_head.out.{part}" in ours:
            yield f"{family.row_head}.{part}", ours.pop(f"row_head.out.{part}")


@torch.no_grad()
def row_logits(
    model: Decoder, theirs: Any, tokens_BS: Tensor, labels: Labels
) -> tuple[Tensor, Tensor]:
    """Return our predictions for padded rows, and those of transformers."""
    seq = tokens_BS.shape[1]
    padding = theirs.config.pad_token_id
    lengths_B = torch.tensor([seq, seq])
    if padding is not None:
        lengths_B[1] = max(1, seq // 2)  # the second row is padded
    real_BS = torch.arange(seq) < lengths_B[:, None]
    tokens_BS = torch.where(real_BS, tokens_BS, padding or 0)
    inputs: Mapping[str, Tensor] = {"last_B": lengths_B - 1}
    if labels.reads == "first":
        inputs = {"documents_BS": (~real_BS).long()}
    targets_BS = torch.full_like(tokens_BS, IGNORED)
    # The labels do not matter, because only the predictions are used.
    out = model.eval()(tokens_BS, targets_BS, labels_B=torch.zeros(2).long(), **inputs)
    # Without a token for padding, transformers accepts only one row at a time.
    together = 2 if padding is not None else 1
    masks = torch.split(real_BS.long(), together)
    rows = zip(torch.split(tokens_BS, together), masks, strict=True)
    logits_BC = torch.cat([theirs(each, attention_mask=mask).logits for each, mask in rows])
    return out.rows_BC, logits_BC
