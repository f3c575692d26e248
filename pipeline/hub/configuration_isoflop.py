"""Configuration of Isoflop's decoder for Hugging Face transformers: a default for every key."""

from typing import Any

from transformers import PretrainedConfig

# A plain pre-norm decoder. Every part is a switch.
DEFAULTS: dict[str, Any] = {
    # Shape
    "vocab_size": 32768,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    # Norms
    "norm_type": "rmsnorm",  # or "layernorm"
    "norm_eps": 1e-6,
    "norm_gain": True,
    "norm_bias": False,
    "norm_placement": "pre",  # or "post", "sandwich", "deepnorm"
    "parallel_block": False,  # attention and feed-forward read the same normed input
    # Positions
    "position_type": "rope",  # or "none"
    "rope_theta": 10000.0,
    "nope_every": None,  # every n-th layer has no position
    # Attention
    "qk_norm": False,
    "attention_bias": False,
    "attention_out_bias": False,
    "attention_window": None,  # tokens that a query attends to, including itself
    "global_attention_every": None,  # every n-th layer ignores the window
    "attention_softcap": None,
    "attention_sinks": False,
    "score_scale": 1.0,  # multiplies 1/√head_dim
    # Feed-forward
    "ffn_type": "ffn",  # or "moe"
    "hidden_act": "swiglu",
    "intermediate_size": 1024,  # of one expert if routed
    "mlp_bias": False,
    # Routed experts
    "dense_intermediate_size": 1024,  # of the layers that are not routed
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "num_shared_experts": 0,
    "router_type": "softmax",  # or "sigmoid"
    "router_groups": 1,
    "router_top_groups": 1,
    "router_bias_step": 0.0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_dense_layers": 0,
    "routed_every": 1,
    # Mixing
    "embedding_norm": False,
    "value_embeddings": None,  # every n-th layer, counted back from the last
    "smear": False,
    "residual_scales": False,
    "backout": False,
    "logit_softcap": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logit_multiplier": 1.0,
}


class IsoflopConfig(PretrainedConfig):
    model_type = "isoflop"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        for name, default in DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, default))
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
