"""Settings that an architecture gives to every size: kinds and switches, never widths."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config import parts
from pipeline.config.parts import Count, Frozen, Positive, Rate, Weight, require


class Multipliers(Frozen):
    # "root_width" multiplies the embedding by √width (arXiv 1706.03762) and divides the logits by
    # it (T5 with a tied head).
    embedding: Rate | Literal["root_width"] = 1.0
    residual: Rate = 1.0  # factor of each layer's output
    logits: Rate | Literal["root_width"] = 1.0


class MuP(Frozen):
    """Width transfer (arXiv 2203.03466, table 8 for Adam): a learning rate tuned at base_width is
    right at any width."""

    base_width: Positive
    base_head_dim: Positive


class Design(Frozen):
    """Settings that an architecture gives to every size."""

    # A decoder attends to earlier tokens only, an encoder to every token of the row.
    stack: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    norm: parts.Norm
    placement: Literal["pre", "post", "sandwich", "deepnorm"] = "pre"
    first_norm: bool = True  # before the first attention; ModernBERT norms the embedding instead
    # All layers share one block (ALBERT), in both stacks or in one.
    share_layers: bool | Literal["encoder", "decoder"] = False
    parallel_block: bool = False  # attention and feed-forward read the same normed input
    position: parts.Position
    nope_every: Positive | None = None  # every n-th layer has no position
    tied: bool  # the head is the input embedding
    own_encoder_embedding: bool = False  # an encoder–decoder's stacks have separate embeddings
    # Width of the embedding's rows, which a projection widens (ALBERT). A tied head uses it too.
    embedding_rank: Positive | None = None
    segments: Count = 0  # kinds of text in a row; each has an embedding that is added (BERT)
    # Extra tokens predicted, one block each (DeepSeek-V3).
    mtp: Annotated[int, Field(ge=0, le=100)] = 0
    mtp_weight: Weight = 0.3
    init_std: Rate
    # The std of a matrix is init_std, or with "fan_in" init_std/√inputs.
    init: Literal["fixed", "fan_in"] = "fixed"
    # For matrices that write to the stream: std/√(2·layers) (Megatron-LM), the same std, or zero,
    # so that a block starts as the identity.
    init_out: Literal["scaled", "same", "zero"] = "scaled"
    # For an untied embedding and head. None, or tied: the std of a matrix that reads the stream,
    # unless the logits are divided by √width.
    embedding_std: Rate | None = None
    head_std: Rate | None = None
    # Multiply the input embedding's initial weights and rate by √width (arXiv 2312.16903).
    scaled_embedding: bool = False
    multipliers: Multipliers = Multipliers()
    # true: RMS norm without gain right after the input embedding. "sum": the model's own norm of
    # the sum of embedding, position and segment (BERT).
    embedding_norm: bool | Literal["sum"] = False
    head: Literal["tokens", "replaced"] = "tokens"  # replaced: which tokens were (ELECTRA)
    # ELECTRA's generator, a second encoder that is trained to fill masks: its share of the width,
    # in whole heads, and the weight of the model's own loss beside the generator's.
    generator: Annotated[float, Field(gt=0, le=1)] | None = None
    replaced_weight: Rate = 50.0
    head_transform: bool = False  # a layer, an activation and a norm before the head (BERT)
    head_bias: bool = False
    # Kinds of rows, predicted from the first token (next sentence: 2), in a decoder from the last.
    row_classes: Count = 0
    # Every n-th layer, counted back from the last, adds an embedding of the token to its values,
    # times a learned gate per head (modded-nanogpt, nanochat).
    value_embeddings: Positive | None = None
    smear: bool = False  # a token's embedding adds a gated part of the previous token's
    residual_scales: bool = False  # learned scales of the stream and the embedding, per layer
    backout: bool = False  # subtract a learned share of the middle layer's stream at the end
    logit_softcap: Rate | None = None  # c·tanh(logits/c)
    parametrization: Literal["standard", "mup"] = "standard"
    mup_base: MuP = MuP(base_width=256, base_head_dim=64)  # where the rate was tuned

    @property
    def mup(self) -> MuP | None:
        return self.mup_base if self.parametrization == "mup" else None

    @model_validator(mode="after")
    def _composes(self) -> Self:
        # Multi-token prediction reads the next token, which an encoder's input already contains.
        text = f'mtp={self.mtp} needs stack="decoder", got "{self.stack}"; set mtp=0'
        require(self.mtp == 0 or self.stack == "decoder", text)
        self._check_stack()
        pre = not self.parallel_block or self.placement == "pre"
        require(pre, f'parallel_block needs placement="pre", got "{self.placement}"')
        scaled_head = self.scaled_embedding and self.tied
        text = "scaled_embedding=true with tied=true would scale the head too; set one to false"
        require(not scaled_head, text)
        text = "embedding_std replaces the std of scaled_embedding=true; use --recipe adamw"
        require(not (self.scaled_embedding and self.embedding_std), text)
        scaled_twice = self.mup is not None and self.init == "fan_in"
        text = 'init="fan_in" conflicts with parametrization="mup", which scales by inputs itself'
        require(not scaled_twice, f"{text}; use --recipe adamw")
        return self

    def _check_stack(self) -> None:
        both = self.stack == "encoder-decoder"
        text = f'needs stack="encoder-decoder", got "{self.stack}"'
        require(both or not self.own_encoder_embedding, f"own_encoder_embedding=true {text}")
        one = isinstance(self.share_layers, str)
        require(both or not one, f'share_layers="{self.share_layers}" {text}; use true')
        text = 'does not work with stack="encoder-decoder"; remove it'
        for key in ("value_embeddings", "smear", "residual_scales", "backout", "segments"):
            require(not both or not getattr(self, key), f"{key}={getattr(self, key)} {text}")
        require(not both or not self.parallel_block, f"parallel_block=true {text}")
        deep = both and self.placement == "deepnorm"
        require(not deep, 'placement="deepnorm" needs one stack; use pre or post')
        text = f"row_classes={self.row_classes} needs one stack, an encoder or a decoder"
        require(not both or not self.row_classes, text)
        replaced = self.head == "replaced"
        text = f'head="replaced" needs stack="encoder", got "{self.stack}"'
        require(not replaced or self.stack == "encoder", text)
        require(not replaced or not self.tied, 'head="replaced" has no rows to tie; set tied=false')
        text = f'logit_softcap={self.logit_softcap} conflicts with head="replaced"; remove it'
        require(not replaced or self.logit_softcap is None, text)
        if self.generator is not None:
            text = f'generator={self.generator} needs head="replaced"'
            require(replaced, f'{text}, got "{self.head}"; remove it')
            require(self.mup is None, f"{text} without muP; remove it")
        by_layer = [self.value_embeddings, self.nope_every, not self.first_norm]
        text = "share_layers conflicts with value_embeddings, nope_every and first_norm=false"
        problem = f"{text}, which differ by layer; remove one of them"
        require(not (self.share_layers and any(by_layer)), problem)
