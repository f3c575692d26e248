"""Names of the tensors of encoders and encoder–decoders (tensors.py has the decoders).

A name within a layer has no prefix here; `LAYERS` has those of the two sides. A name that begins
with "encoder." is of the encoder's layers alone.
"""

Names = dict[str, str]  # our name → their names; several if we fuse tensors that they split


def pair(ours: str, theirs: str) -> Names:
    """Weight and bias of a linear layer."""
    return {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")}


def norm(ours: str, theirs: str) -> Names:
    return {f"{ours}.gain": f"{theirs}.weight", f"{ours}.bias": f"{theirs}.bias"}


def fused(ours: str, theirs: str, parts: str) -> Names:
    """Weights and biases that we fuse; {} stands for each part in turn."""
    return {
        f"{ours}.{kind}": " ".join(f"{theirs.format(part)}.{kind}" for part in parts.split())
        for kind in ("weight", "bias")
    }


def _bert(at: str) -> Names:
    """BERT's embedding and layers, which several models have."""
    return {
        "embedding.weight": f"{at}.embeddings.word_embeddings.weight",
        "position.weight": f"{at}.embeddings.position_embeddings.weight",
        "segments.weight": f"{at}.embeddings.token_type_embeddings.weight",
        **norm("embedding_norm", f"{at}.embeddings.LayerNorm"),
        **fused("attention.qkv", "attention.self.{}", "query key value"),
        **pair("attention.out", "attention.output.dense"),
        **norm("at_attention.after", "attention.output.LayerNorm"),
        **pair("ffn.up", "intermediate.dense"),
        **pair("ffn.out", "output.dense"),
        **norm("at_ffn.after", "output.LayerNorm"),
    }


def _head(transform: str, after: str, out: str, bias: str) -> Names:
    names = {**pair("transform.dense", transform), **norm("transform.norm", after)}
    return {**names, "head.weight": f"{out}.weight", "head.bias": bias}


_T5: Names = {
    "embedding.weight": "shared.weight",
    "position.weight": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder.position.weight": (
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    ),
    "norm.gain": "decoder.final_layer_norm.weight",
    "encoder.norm.gain": "encoder.final_layer_norm.weight",
    "head.weight": "lm_head.weight",
    **fused("attention.qkv", "layer.0.SelfAttention.{}", "q k v"),
    **pair("attention.out", "layer.0.SelfAttention.o"),
    "at_attention.before.gain": "layer.0.layer_norm.weight",
    **pair("cross.q", "layer.1.EncDecAttention.q"),
    **fused("cross.kv", "layer.1.EncDecAttention.{}", "k v"),
    **pair("cross.out", "layer.1.EncDecAttention.o"),
    "at_cross.before.gain": "layer.1.layer_norm.weight",
    "at_ffn.before.gain": "layer.2.layer_norm.weight",
    **fused("ffn.up", "layer.2.DenseReluDense.{}", "wi_0 wi_1"),
    **pair("ffn.out", "layer.2.DenseReluDense.wo"),
    # The encoder's layers have no cross-attention before these.
    "encoder.at_ffn.before.gain": "layer.1.layer_norm.weight",
    **fused("encoder.ffn.up", "layer.1.DenseReluDense.{}", "wi_0 wi_1"),
    **pair("encoder.ffn.out", "layer.1.DenseReluDense.wo"),
}
_BART: Names = {
    "embedding.weight": "model.shared.weight",
    "position.weight": "model.decoder.embed_positions.weight",
    "encoder.position.weight": "model.encoder.embed_positions.weight",
    **norm("embedding_norm", "model.decoder.layernorm_embedding"),
    **norm("encoder.embedding_norm", "model.encoder.layernorm_embedding"),
    "head.weight": "lm_head.weight",
    **fused("attention.qkv", "self_attn.{}_proj", "q k v"),
    **pair("attention.out", "self_attn.out_proj"),
    **norm("at_attention.after", "self_attn_layer_norm"),
    **pair("cross.q", "encoder_attn.q_proj"),
    **fused("cross.kv", "encoder_attn.{}_proj", "k v"),
    **pair("cross.out", "encoder_attn.out_proj"),
    **norm("at_cross.after", "encoder_attn_layer_norm"),
    **pair("ffn.up", "fc1"),
    **pair("ffn.out", "fc2"),
    **norm("at_ffn.after", "final_layer_norm"),
}
STACK_TENSORS: dict[str, Names] = {
    "bert": {
        **_bert("bert"),
        **_head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
        **pair("row_head.pool", "bert.pooler.dense"),
        **pair("row_head.out", "cls.seq_relationship"),
    },
    "roberta": {
        **_bert("roberta"),
        **_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    },
    "electra": {
        **_bert("electra"),
        **pair("embedding_projection", "electra.embeddings_project"),
        **pair("transform.dense", "discriminator_predictions.dense"),
        **pair("head", "discriminator_predictions.dense_prediction"),
    },
    "albert": {
        **_bert("albert"),
        **pair("embedding_projection", "albert.encoder.embedding_hidden_mapping_in"),
        **fused("attention.qkv", "attention.{}", "query key value"),
        **pair("attention.out", "attention.dense"),
        **norm("at_attention.after", "attention.LayerNorm"),
        **pair("ffn.up", "ffn"),
        **pair("ffn.out", "ffn_output"),
        **norm("at_ffn.after", "full_layer_layer_norm"),
        **_head(
            "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
        ),
        **pair("row_head.pool", "albert.pooler"),
        **pair("row_head.out", "sop_classifier.classifier"),
    },
    "distilbert": {
        **_bert("distilbert"),
        **fused("attention.qkv", "attention.{}_lin", "q k v"),
        **pair("attention.out", "attention.out_lin"),
        **norm("at_attention.after", "sa_layer_norm"),
        **pair("ffn.up", "ffn.lin1"),
        **pair("ffn.out", "ffn.lin2"),
        **norm("at_ffn.after", "output_layer_norm"),
        **_head("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    },
    "modernbert": {
        "embedding.weight": "model.embeddings.tok_embeddings.weight",
        **norm("embedding_norm", "model.embeddings.norm"),
        **norm("at_attention.before", "attn_norm"),
        **pair("attention.qkv", "attn.Wqkv"),
        **pair("attention.out", "attn.Wo"),
        **norm("at_ffn.before", "mlp_norm"),
        **pair("ffn.up", "mlp.Wi"),
        **pair("ffn.out", "mlp.Wo"),
        **norm("norm", "model.final_norm"),
        **_head("head.dense", "head.norm", "decoder", "decoder.bias"),
    },
    "t5": _T5,
    "bart": _BART,
    "marian": _BART,
}
# Prefixes of the layers: of the decoder or the only stack, and of the encoder.
LAYERS = {
    "gpt2": ("transformer.h.{}.", ""),
    "bert": ("bert.encoder.layer.{}.", ""),
    "roberta": ("roberta.encoder.layer.{}.", ""),
    "electra": ("electra.encoder.layer.{}.", ""),
    "albert": ("albert.encoder.albert_layer_groups.0.albert_layers.{}.", ""),
    "distilbert": ("distilbert.transformer.layer.{}.", ""),
    "t5": ("decoder.block.{}.", "encoder.block.{}."),
    "bart": ("model.decoder.layers.{}.", "model.encoder.layers.{}."),
    "marian": ("model.decoder.layers.{}.", "model.encoder.layers.{}."),
}
DEFAULT_LAYERS = ("model.layers.{}.", "")
