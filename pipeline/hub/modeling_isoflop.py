"""Isoflop's decoder for Hugging Face transformers, in one file of plain torch.

B batch · S new tokens · K tokens with those in the cache · W width · T = B·S tokens
H query heads · G key/value heads · D head width · E experts

Written by `launch export` of the Isoflop pipeline, which checked that its own logits are the same.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_isoflop import IsoflopConfig


def make_norm(width: int, config: IsoflopConfig) -> nn.Module:
    gain = config.norm_gain
    if config.norm_type == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps, elementwise_affine=gain)
    return nn.LayerNorm(width, config.norm_eps, elementwise_affine=gain, bias=config.norm_bias)


def every(n: int | None, layer: int) -> bool:
    """Return whether a layer is the last of n layers: layer n-1, 2n-1, and so on."""
    return n is not None and layer % n == n - 1


def rotate(x_BHSD: Tensor, angle_BSD: Tensor) -> Tensor:
    """Rotate channel i with channel i + half, in fp32."""
    cos = angle_BSD.cos()[:, None]
    sin = angle_BSD.sin()[:, None]
    a, b = x_BHSD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BHSD)


class IsoflopAttention(nn.Module):
    def __init__(self, config: IsoflopConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        dim = config.head_dim
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.layer = layer
        self.head_dim = dim
        self.scale = config.score_scale / math.sqrt(dim)
        self.softcap = config.attention_softcap
        is_global = every(config.global_attention_every, layer)
        self.window = None if is_global else config.attention_window
        self.rotates = config.position_type == "rope" and not every(config.nope_every, layer)
        self.q_proj = nn.Linear(width, heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * dim, width, bias=config.attention_out_bias)
        self.q_norm = make_norm(dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(dim, config) if config.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sinks else None
        self.value_embedding: nn.Embedding | None = None
        # Counted back from the last layer, which always has one.
        n = config.value_embeddings
        if n is not None and (config.num_hidden_layers - 1 - layer) % n == 0:
            self.value_embedding = nn.Embedding(config.vocab_size, kv_heads * dim)
            self.value_gate = nn.Linear(min(12, width), kv_heads, bias=False)

    def forward(
        self,
        x_BSW: Tensor,
        ids_BS: Tensor,
        angle_BSD: Tensor,
        distance_SK: Tensor,
        seen: Tensor,
        cache: Any,
    ) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head_dim)

        q = self.q_norm(split(self.q_proj(x_BSW))).transpose(1, 2)
        k = self.k_norm(split(self.k_proj(x_BSW))).transpose(1, 2)
        v = split(self.v_proj(x_BSW))
        if self.value_embedding is not None:
            gate_BSG = 3 * torch.sigmoid(self.value_gate(x_BSW[..., : self.value_gate.in_features]))
            v = v + gate_BSG.unsqueeze(-1) * split(self.value_embedding(ids_BS))
        v = v.transpose(1, 2)
        if self.rotates:
            q = rotate(q, angle_BSD)
            k = rotate(k, angle_BSD)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if self.window is not None:
            seen = seen & (distance_SK < self.window)
        y_BHSD = self.attend(q, k, v, seen)
        out: Tensor = self.o_proj(y_BHSD.transpose(1, 2).flatten(2))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=group > 1
            )
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        scores = (q.float() @ k.float().mT) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            # A sink is one more key whose value is zero.
            sink = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v.float()).type_as(q)


class IsoflopMLP(nn.Module):
    def __init__(self, config: IsoflopConfig, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.activation = config.hidden_act
        self.gated = self.activation.endswith("glu")
        if self.gated:
            self.gate_proj = nn.Linear(config.hidden_size, hidden, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        gate = self.gate_proj(x) if self.gated else up
        match self.activation:
            case "swiglu" | "silu":
                gate = F.silu(gate)
            case "geglu" | "gelu":
                gate = F.gelu(gate)
            case "gelu_tanh" | "tanh_geglu":
                gate = F.gelu(gate, approximate="tanh")
            case "reglu" | "relu":
                gate = F.relu(gate)
            case "relu2":
                gate = F.relu(gate).square()
        out: Tensor = self.down_proj(gate * up if self.gated else gate)
        return out


class IsoflopRouter(nn.Module):
    def __init__(self, config: IsoflopConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Ranks experts and adds nothing to their weights (arXiv 2408.15664).
        bias = torch.zeros(config.num_experts) if config.router_bias_step else None
        self.register_buffer("e_score_correction_bias", bias)
        self.e_score_correction_bias: Tensor | None

    def forward(self, x_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights."""
        c = self.config
        logits_TE = F.linear(x_TW.float(), self.weight.float())
        softmax = c.router_type == "softmax"
        scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
        ranks_TE = scores_TE
        if self.e_score_correction_bias is not None:
            ranks_TE = ranks_TE + self.e_score_correction_bias.float()
        if c.router_groups > 1:
            # Choose only in the best groups: by their best expert (softmax) or best two (sigmoid).
            grouped = ranks_TE.view(len(ranks_TE), c.router_groups, -1)
            best = grouped.topk(min(1 if softmax else 2, grouped.shape[-1]), -1).values.sum(-1)
            chosen = torch.zeros_like(best, dtype=torch.bool)
            chosen = chosen.scatter(-1, best.topk(c.router_top_groups, -1).indices, True)
            ranks_TE = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
        experts_TK = ranks_TE.topk(c.num_experts_per_tok, -1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if c.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return experts_TK, weights_TK * c.routed_scaling_factor


class IsoflopExperts(nn.Module):
    def __init__(self, config: IsoflopConfig) -> None:
        super().__init__()
        hidden = config.intermediate_size
        self.gate = IsoflopRouter(config)
        self.experts = nn.ModuleList(IsoflopMLP(config, hidden) for _ in range(config.num_experts))
        shared = config.num_shared_experts * hidden
        self.shared_experts = IsoflopMLP(config, shared) if shared else None

    def forward(self, x_BSW: Tensor) -> Tensor:
        x_TW = x_BSW.flatten(0, 1)
        experts_TK, weights_TK = self.gate(x_TW)
        y_TW = torch.zeros_like(x_TW, dtype=torch.float32)
        for index, expert in enumerate(self.experts):
            token, slot = (experts_TK == index).nonzero(as_tuple=True)
            weighted = expert(x_TW[token]) * weights_TK[token, slot].unsqueeze(-1)
            y_TW = y_TW.index_add(0, token, weighted.float())
        y_TW = y_TW.type_as(x_TW)
        if self.shared_experts is not None:
            y_TW = y_TW + self.shared_experts(x_TW)
        return y_TW.view_as(x_BSW)


class IsoflopSublayer(nn.Module):
    """The norms around one layer, and how its output is added to the stream."""

    def __init__(self, config: IsoflopConfig) -> None:
        super().__init__()
        place = config.norm_placement
        width = config.hidden_size
        before = place in ("pre", "sandwich")
        after = place in ("post", "deepnorm")
        self.before = make_norm(width, config) if before else nn.Identity()
        self.inside = make_norm(width, config) if place == "sandwich" else nn.Identity()
        self.after = make_norm(width, config) if after else nn.Identity()
        self.multiplier = config.residual_multiplier
        # arXiv 2203.00555, table 1.
        deep = (2 * config.num_hidden_layers) ** 0.25
        self.stream_scale = deep if place == "deepnorm" else 1.0

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.after(self.stream_scale * x + self.multiplier * self.inside(y))
        return out


class IsoflopLayer(nn.Module):
    def __init__(self, config: IsoflopConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = IsoflopAttention(config, layer)
        sparse = layer - config.first_dense_layers
        routed = sparse >= 0 and every(config.routed_every, sparse)
        if config.ffn_type == "moe" and routed:
            self.mlp: nn.Module = IsoflopExperts(config)
        elif config.ffn_type == "moe":
            self.mlp = IsoflopMLP(config, config.dense_intermediate_size)
        else:
            self.mlp = IsoflopMLP(config, config.intermediate_size, config.mlp_bias)
        self.attention_norms = IsoflopSublayer(config)
        self.mlp_norms = None if config.parallel_block else IsoflopSublayer(config)
        self.scaled = config.residual_scales
        if self.scaled:
            self.stream_scale = nn.Parameter(torch.ones(1))
            self.first_scale = nn.Parameter(torch.zeros(1))

    def forward(self, x_BSW: Tensor, first_BSW: Tensor, *attention: Any) -> Tensor:
        if self.scaled:
            x_BSW = self.stream_scale * x_BSW + self.first_scale * first_BSW
        normed = self.attention_norms.before(x_BSW)
        y_BSW = self.self_attn(normed, *attention)
        if self.mlp_norms is None:  # both layers read the same input
            return self.attention_norms.add(x_BSW, y_BSW + self.mlp(normed))
        x_BSW = self.attention_norms.add(x_BSW, y_BSW)
        return self.mlp_norms.add(x_BSW, self.mlp(self.mlp_norms.before(x_BSW)))


class IsoflopPreTrainedModel(PreTrainedModel):
    config_class = IsoflopConfig
    base_model_prefix = "model"
    _no_split_modules = ["IsoflopLayer"]  # noqa: RUF012
    _supports_sdpa = True


class IsoflopModel(IsoflopPreTrainedModel):
    def __init__(self, config: IsoflopConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(
            IsoflopLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        last = config.norm_placement in ("pre", "sandwich")
        self.norm = make_norm(width, config) if last else nn.Identity()
        if config.smear:
            self.smear_gate = nn.Linear(min(24, width), 1, bias=False)
            self.smear_scale = nn.Parameter(torch.zeros(1))
        self.backout_scale = nn.Parameter(torch.full((1,), 0.2)) if config.backout else None
        self.post_init()

    def embed(self, ids_BS: Tensor, previous_B1: Tensor, places_BS: Tensor) -> Tensor:
        """Return token embeddings. With `smear`, each adds a gated part of the one before it."""
        c = self.config
        if c.smear:
            ids_BS = torch.cat((previous_B1, ids_BS), dim=1)
        x_BSW: Tensor = self.embed_tokens(ids_BS)
        if c.embedding_norm:
            x_BSW = F.rms_norm(x_BSW, x_BSW.shape[-1:], eps=c.norm_eps)
        x_BSW = x_BSW * c.embedding_multiplier
        if not c.smear:
            return x_BSW
        here_BSW = x_BSW[:, 1:]
        gate_BS1 = torch.sigmoid(self.smear_gate(here_BSW[..., : self.smear_gate.in_features]))
        # The first token of a text follows none.
        gate_BS1 = self.smear_scale * gate_BS1 * (places_BS > 0).unsqueeze(-1)
        return here_BSW + gate_BS1 * x_BSW[:, :-1]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        previous_ids: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states. `previous_ids`, (B, 1), are the tokens before `input_ids`; only a
        model with `smear` needs them, and only with a cache that is not empty."""
        c = self.config
        new = input_ids.shape[1]
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        slots_K = torch.arange(past + new, device=input_ids.device)
        distance_SK = slots_K[past:, None] - slots_K
        seen = (distance_SK >= 0)[None, None]
        if attention_mask is not None:
            real = attention_mask.bool()
            # Padding attends to itself, because a softmax over no keys would be NaN.
            seen = seen & (real[:, None, None] | (distance_SK == 0))
            if position_ids is None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        if position_ids is None:
            position_ids = slots_K[None, past:]
        if previous_ids is None:
            if past and c.smear:
                raise ValueError("pass previous_ids, the token before input_ids, with this cache")
            previous_ids = input_ids[:, :1]
        x_BSW = self.embed(input_ids, previous_ids, position_ids)
        pairs = torch.arange(0, c.head_dim, 2, device=x_BSW.device, dtype=torch.float32)
        angle_BSD = position_ids[..., None].float() * c.rope_theta ** -(pairs / c.head_dim)
        first_BSW = x_BSW
        middle_BSW = x_BSW
        for index, layer in enumerate(self.layers):
            attention = (input_ids, angle_BSD, distance_SK, seen, past_key_values)
            x_BSW = layer(x_BSW, first_BSW, *attention)
            # Never the last: a share of the last would only scale it, which the norm undoes.
            if index == max(0, min(len(self.layers) // 2, len(self.layers) - 2)):
                middle_BSW = x_BSW
        if self.backout_scale is not None:
            x_BSW = x_BSW - self.backout_scale * middle_BSW
        out: Tensor = self.norm(x_BSW)
        return out


class IsoflopForCausalLM(IsoflopPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: IsoflopConfig) -> None:
        super().__init__(config)
        self.model = IsoflopModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        first = input_ids.shape[1] - inputs["input_ids"].shape[1]
        inputs["previous_ids"] = input_ids[:, first - 1 : first] if first else None
        return inputs

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        previous_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        h_BSW = self.model(input_ids, attention_mask, position_ids, past_key_values, previous_ids)
        h_BSW = h_BSW[:, -logits_to_keep:] * self.config.logit_multiplier
        logits = self.lm_head(h_BSW)
        cap = self.config.logit_softcap
        if cap is not None:
            logits = (cap * torch.tanh(logits.float() / cap)).type_as(logits)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
