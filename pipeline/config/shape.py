"""Size × architecture → model: the one place where ratios become widths.

`Size` is a row of configs/sizes.toml and `Arch` a file of configs/arch: numbers, and kinds with
ratios. `cross` combines them into the table of a `Model`, in which every number is absolute.
"""

import math
from typing import Annotated, Any, Literal, Self, assert_never

from pydantic import Field, model_validator

from pipeline.config import parts
from pipeline.config.parts import Frozen, Positive, require
from pipeline.config.switches import Design
from pipeline.errors import ConfigError

# Prefixes of parameter names that are tables: a token or a position looks up a row.
TABLES = (
    "embedding.",
    "value_embeddings.",
    "position.",
    "segments.",
    "encoder.embedding.",
    "encoder.position.",
)
# Prefixes of the parameters that Muon may step: matrices of blocks.
BLOCKS = ("blocks.", "encoder.blocks.", "ahead.")
# Suffixes of small matrices that make gates. They read the first channels of their input, whatever
# its width, and are vectors to the optimizer: neither decayed nor orthogonalized.
GATES = ("value_gate.weight", "smear.gate.weight")

# Every count is a loop over the layers. The deepest published model has 1,000 (arXiv 2203.00555).
Layers = Annotated[int, Field(gt=0, le=10_000)]


class Size(Frozen):
    """One row of the ladder."""

    layers: Layers
    width: Positive
    heads: Positive
    kv_heads: Positive | None = None  # None: as many as heads
    head_dim: Positive | None = None  # None: width / heads
    ffn: Positive  # hidden width of a gated FFN; an architecture with its own ratio ignores it
    expert_ffn: Positive | None = None  # hidden width of an expert; None: from the architecture
    arch: str | None = None  # the architecture of a published model; None: dense


class Arch(Design):
    """Kinds and ratios, never widths."""

    seq: Positive | None = None  # length of the paper's rows; None: as in configs/base.toml
    attention: parts.ArchAttention
    ffn: parts.ArchFeed


class Model(Design):
    size: str = "custom"
    arch: str = "custom"
    vocab: Positive
    seq: Positive
    # The length that the weights were trained on, if fine-tuning has shorter rows.
    context: Positive | None = None
    width: Positive
    layers: Layers
    # The encoder of an encoder–decoder. None: the same as the decoder's `layers` and `seq`.
    encoder_layers: Layers | None = None
    source_seq: Positive | None = None
    attention: parts.Attention
    ffn: parts.Feed

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._check_position()
        for key in ("encoder_layers", "source_seq"):
            given = getattr(self, key)
            text = f'{key}={given} needs stack="encoder-decoder", got "{self.stack}"; remove {key}'
            require(given is None or self.stack == "encoder-decoder", text)
        a = self.attention
        if isinstance(a, parts.MLA):
            for key, rank in (("q_rank", a.q_rank or 0), ("kv_rank", a.kv_rank)):
                require(rank <= self.width, f"attention.{key}={rank} is above width={self.width}")
            text = f'value_embeddings={self.value_embeddings} needs attention.kind="gqa"'
            plain = self.value_embeddings is None
            require(plain, f"{text}; latent attention has no values to add to: remove it")
            text = 'stack="encoder-decoder" needs attention.kind="gqa", got "mla"'
            require(self.stack != "encoder-decoder", text)
        text = "share_layers conflicts with attention.global_every, which differs by layer"
        require(not (self.share_layers and a.global_every), f"{text}; remove one")
        text = 'share_layers needs ffn.kind="ffn": a router balances one layer'
        require(not (self.share_layers and isinstance(self.ffn, parts.MoE)), text)
        text = 'attention.scaled=false conflicts with parametrization="mup", which scales scores'
        require(a.scaled or self.mup is None, f"{text}; remove one")
        rank = self.embedding_rank or 1
        require(rank <= self.width, f"embedding_rank={rank} is above width={self.width}")
        if isinstance(self.ffn, parts.MoE):
            skipped = f"ffn.dense_layers={self.ffn.dense_layers} and every={self.ffn.every}"
            text = f"{skipped} leave none of layers={self.layers} routed"
            require(any(map(self.routed, range(self.layers))), text)
        if self.generator is not None:
            text = f'generator={self.generator} needs attention.kind="gqa" and ffn.kind="ffn"'
            plain = isinstance(a, parts.GQA) and isinstance(self.ffn, parts.FFN)
            require(plain, f"{text}; remove it")
            same = isinstance(a, parts.GQA) and a.kv_heads == a.heads
            require(same, f"generator={self.generator} needs as many kv_heads as heads; remove it")
        require(self.mtp < self.seq, f"mtp={self.mtp} predicts beyond seq={self.seq}")
        return self

    def _check_position(self) -> None:
        a = self.attention
        if isinstance(self.position, parts.RoPE):
            key = "rope_dim" if isinstance(a, parts.MLA) else "head_dim"
            text = f"attention.{key}={a.rotary_dim} is odd; rotary positions rotate channel pairs"
            require(a.rotary_dim % 2 == 0, text)
            # NTK scaling leaves the fastest pair as it is, so a single pair would not be scaled.
            single = isinstance(self.position.scaling, parts.NTK) and a.rotary_dim == 2
            text = f'position.scaling.kind="ntk" needs attention.{key} above 2'
            require(not single, text)
        if self.nope_every is not None:
            by_layer = isinstance(self.position, parts.RoPE | parts.RelativeBias | parts.ALiBi)
            text = f'nope_every={self.nope_every} conflicts with "{self.position.kind}" positions'
            require(by_layer, f"{text}; use rope, relative or alibi")
        if isinstance(self.position, parts.Sinusoidal):
            even = self.input_width % 2 == 0
            require(even, f"width={self.input_width} is odd; sinusoidal needs pairs")

    def routed(self, layer: int) -> bool:
        """Whether the feed-forward of a layer is routed."""
        f = self.ffn
        if not isinstance(f, parts.MoE) or layer < f.dense_layers:
            return False
        return (layer - f.dense_layers) % f.every == f.every - 1

    def expert_degrees(self, ranks: int) -> list[int]:
        """Possible degrees of expert parallelism: divisors of experts and ranks."""
        return divisors(math.gcd(self.ffn.experts if isinstance(self.ffn, parts.MoE) else 1, ranks))

    def sequence_degrees(self, ranks: int) -> list[int]:
        """Possible degrees of sequence parallelism: divisors of heads, sequence and ranks."""
        return divisors(math.gcd(self.attention.heads, self.seq, self.source_seq or 0, ranks))

    def value_layer(self, layer: int) -> bool:
        """Whether a layer adds a value embedding: every n-th layer, ending with the last."""
        every = self.value_embeddings
        return every is not None and (self.layers - 1 - layer) % every == 0

    @property
    def middle_layer(self) -> int:
        """The layer after which `backout` reads the stream, as in nanochat; with two layers the
        first, because a share of the last stream only scales it, which the next norm undoes."""
        return max(0, min(self.layers // 2, self.layers - 2))

    @property
    def value_gate_inputs(self) -> int:
        """Channels that the gate of a value embedding reads, as in nanochat."""
        return min(12, self.width)

    @property
    def smear_inputs(self) -> int:
        """Channels that the gate of `smear` reads, as in nanochat."""
        return min(24, self.input_width)

    @property
    def input_width(self) -> int:
        """Width of the embedding, before any projection to the stream."""
        return self.embedding_rank or self.width

    @property
    def head_width(self) -> int:
        """Width of the vectors that the output matrix reads."""
        return self.input_width if self.tied else self.width

    @property
    def source_layers(self) -> int:
        """Layers of the encoder of an encoder–decoder."""
        both = self.stack == "encoder-decoder"
        return (self.encoder_layers or self.layers) if both else 0

    @property
    def longest(self) -> int:
        """Tokens that the weights were trained to read, in this run or before fine-tuning."""
        return max(self.seq, self.context or 0)

    @property
    def source_length(self) -> int:
        both = self.stack == "encoder-decoder"
        return (self.source_seq or self.seq) if both else 0

    @property
    def learned_positions(self) -> int:
        """Rows of a table of learned positions, in both stacks as many as the longer one needs."""
        return max(self.seq, self.source_length)

    @property
    def generator_model(self) -> "Model | None":
        """ELECTRA's generator. Everything before the projection of the embedding is shared."""
        a = self.attention
        f = self.ffn
        if self.generator is None or not isinstance(a, parts.GQA):
            return None
        heads = max(1, round(self.generator * a.heads))
        width = self.width * heads // a.heads
        change = {
            "attention": a.model_copy(update={"heads": heads, "kv_heads": heads}),
            "ffn": f.model_copy(update={"hidden": f.hidden * heads // a.heads}),
            "width": width,
            # Not validated, because the shared embedding may be wider than the generator.
            "embedding_rank": None if width == self.input_width else self.input_width,
            "tied": True,
            "head": "tokens",
            "generator": None,
        }
        return self.model_copy(update=change)

    def shares(self, side: Literal["encoder", "decoder"]) -> bool:
        """Whether all layers of a stack share one block; a single stack has both names."""
        return self.share_layers is True or self.share_layers == side

    @property
    def causal(self) -> bool:
        """Whether a token attends only to earlier tokens, apart from a prefix."""
        return self.stack != "encoder"

    def windowed(self, layer: int) -> bool:
        a = self.attention
        if a.global_first and a.global_every is not None:
            return layer % a.global_every != 0
        return a.window is not None and not _every(a.global_every, layer)

    def placed(self, layer: int) -> bool:
        """Whether a layer has positions."""
        return not _every(self.nope_every, layer)

    def narrower(self, name: str) -> float:
        """Under muP, the input width at which the rate was tuned, divided by the input width here.
        It is 1 for embeddings, whose input is the vocabulary, and for the head, whose output is
        scaled instead. The rank of a latent grows with the head width."""
        fixed = (*TABLES, "head.", "row_head.out.", "embedding_projection.")
        if self.mup is None or name.startswith(fixed) or name.endswith(GATES):
            return 1.0
        a = self.attention
        if isinstance(a, parts.MLA):
            latents = ("kv_up.weight",) if a.q_rank is None else ("kv_up.weight", "q_up.weight")
            if name.endswith(latents):
                return self.mup.base_head_dim / a.head_dim
        return self.mup.base_width / self.width

    @property
    def embedding_scale(self) -> float:
        """Factor of the input embedding's initial weights and rate, which makes the first outputs
        of the layers small relative to the stream. Under muP it does not depend on the width."""
        if not self.scaled_embedding:
            return 1.0
        return math.sqrt(self.mup.base_width if self.mup else self.width)

    @property
    def score_scale(self) -> float:
        """Factor of q·k: 1/√d, and proportional to 1/d under muP."""
        scaling = self.position.scaling if isinstance(self.position, parts.RoPE) else None
        factor = scaling.scores if isinstance(scaling, parts.YaRN) else 1.0
        a = self.attention
        if not a.scaled:
            return a.score_scale * factor
        widened = 1.0 if self.mup is None else a.head_dim / self.mup.base_head_dim
        return a.score_scale * factor / math.sqrt(a.score_dim * widened)

    @property
    def logit_scale(self) -> float:
        widened = 1.0 if self.mup is None else self.mup.base_width / self.width
        return self.logit_multiplier * widened

    @property
    def logit_multiplier(self) -> float:
        given = self.multipliers.logits
        return self.width**-0.5 if given == "root_width" else given

    @property
    def embedding_multiplier(self) -> float:
        given = self.multipliers.embedding
        return self.width**0.5 if given == "root_width" else given


def _every(n: int | None, layer: int) -> bool:
    """Whether a layer is one of the n-th layers: n-1, 2n-1, and so on."""
    return n is not None and layer % n == n - 1


def divisors(n: int) -> list[int]:
    """Return the divisors in ascending order, in √n steps: a batch may have billions of tokens."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def cross(size: Size, arch: Arch, seq: int) -> dict[str, Any]:
    """The model table of a run config without vocabulary. `seq` is the length of rows in
    configs/base.toml, which an architecture may only shorten."""
    # Small sizes keep a rank below their width.
    rank = None if arch.embedding_rank is None else min(arch.embedding_rank, size.width // 2)
    return {
        **arch.model_dump(include=set(Design.model_fields)),
        "seq": min(arch.seq or seq, seq),
        "embedding_rank": rank,
        "width": size.width,
        "layers": size.layers,
        "attention": _attention(size, arch.attention),
        "ffn": _ffn(size, arch.ffn),
    }


def _attention(size: Size, arch: parts.ArchGQA | parts.ArchMLA) -> dict[str, Any]:
    if size.head_dim is None and size.width % size.heads:
        text = f"width={size.width} is not a multiple of heads={size.heads}"
        raise ConfigError(f"{text}; set head_dim in the size's row")
    head_dim = size.head_dim or size.width // size.heads
    match arch:
        case parts.ArchGQA():
            kv_heads = size.kv_heads or size.heads
            if arch.group is not None:
                kv_heads = max(1, size.heads // arch.group)
            table = arch.model_dump(include=set(parts.GQAKind.model_fields))
            return {**table, "heads": size.heads, "kv_heads": kv_heads, "head_dim": head_dim}
        case parts.ArchMLA():
            most = size.width // 2
            q_rank = None if arch.q_ratio is None else min(round(arch.q_ratio * head_dim), most)
            return {
                **arch.model_dump(include={"kind", *parts.Scores.model_fields}),
                "heads": size.heads,
                "q_rank": q_rank,
                "kv_rank": min(round(arch.kv_ratio * head_dim), most),
                "nope_dim": head_dim,
                "rope_dim": max(2, round(arch.rope_ratio * head_dim / 2) * 2),
                "v_dim": head_dim,
            }
        case _:
            assert_never(arch)


def _ffn(size: Size, arch: parts.ArchFFN | parts.ArchMoE) -> dict[str, Any]:
    hidden = size.ffn if arch.ratio is None else round(arch.ratio * size.width)
    match arch:
        case parts.ArchFFN():
            return {**arch.model_dump(include=set(parts.FFNKind.model_fields)), "hidden": hidden}
        case parts.ArchMoE():
            expert = hidden
            if arch.expert_share != 1:  # a GPU's grouped matmul needs multiples of 16
                expert = max(16, round(arch.expert_share * hidden / 16) * 16)
            return {
                **arch.model_dump(include=set(parts.MoEKind.model_fields)),
                "hidden": size.expert_ffn or expert,
                "dense_hidden": hidden,
                # A shallow size still routes its last layer.
                "dense_layers": min(arch.dense_layers, size.layers - 1),
            }
        case _:
            assert_never(arch)
