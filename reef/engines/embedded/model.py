"""The forward pass of a dense decoder over fused weights, for prompts and for one new token a row.

Written out instead of calling transformers because at laptop sizes the fixed cost of each operation is the cost.
Shape letters: B rows, P prompt length, N hidden, H query heads, K key-value heads, G = H / K, D head_dim, S cached
columns, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from reef.engines.embedded.architecture import Architecture
from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.weights import LayerWeights, Weights


class Model:
    """Architecture and weights; holds no state of any sequence."""

    def __init__(self, arch: Architecture, weights: Weights) -> None:
        self.arch = arch
        self.weights = weights
        angles = torch.arange(arch.context_length).float()[:, None] * torch.tensor(arch.rope_frequencies)
        self._turns = torch.polar(torch.full_like(angles, arch.rope_scale), angles)
        """[context, D / 2] complex: position p turns pair i by its angle."""
        self._scale = arch.head_dim**-0.5

    def prefill(
        self, ids_BP: torch.Tensor, cache: KVCache, rows_R: torch.Tensor, prompts_R: torch.Tensor
    ) -> torch.Tensor:
        """Runs right-padded prompts and stores prompt `prompts_R[i]` in cache row `rows_R[i]`.

        Returns the last hidden states [B, P, N]. Padding needs no mask: causal attention never looks right, and the
        columns behind a prompt are overwritten before they are read.
        """
        arch = self.arch
        B, P = ids_BP.shape
        turns = self._turns[:P, None]
        x = F.embedding(ids_BP, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            q, kv = self._project(layer, x, turns)
            kv = kv.view(B, P, 2, arch.num_kv_heads, arch.head_dim).permute(2, 0, 3, 1, 4)
            if len(rows_R):
                cache.store_prompts(index, rows_R, prompts_R, kv)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), kv[0], kv[1], is_causal=True, scale=self._scale, enable_gqa=True
            )
            x = self._rest(layer, x, mixed.transpose(1, 2).reshape(B, P, -1))
        return x

    def decode(self, ids_B: torch.Tensor, positions_B: torch.Tensor, cache: KVCache, width: int) -> torch.Tensor:
        """Feeds one token a row at its position and returns logits [B, V]; `width` is the largest position + 1."""
        arch = self.arch
        B, K, G = len(ids_B), arch.num_kv_heads, arch.num_heads // arch.num_kv_heads
        turns = self._turns[positions_B].unsqueeze(1)
        slots = cache.slots(positions_B)
        x = F.embedding(ids_B, self.weights.embedding)
        bias = x.new_zeros(B, width).masked_fill_(torch.arange(width) > positions_B[:, None], float("-inf"))
        bias = bias[:, None, None].expand(B, K, 1, width).reshape(B * K, 1, width)
        for index, layer in enumerate(self.weights.layers):
            q, kv = self._project(layer, x, turns)
            keys, values = cache.append(index, slots, kv.reshape(-1, arch.head_dim), B, width)
            scores = torch.baddbmm(bias, q.reshape(B * K, G, arch.head_dim), keys.transpose(1, 2), alpha=self._scale)
            x = self._rest(layer, x, torch.bmm(torch.softmax(scores, -1), values).view(B, -1))
        return self.logits(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., N] hidden states of `prefill` -> [..., V] float32 logits."""
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _project(self, layer: LayerWeights, x: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [..., H, D], and rotated keys followed by values [..., 2K, D]."""
        arch = self.arch
        H, K, D = arch.num_heads, arch.num_kv_heads, arch.head_dim
        qkv = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(*x.shape[:-1], H + 2 * K, D)
        qk = qkv[..., : H + K, :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (D,), None, arch.norm_eps) * layer.qk_norm
        pairs = torch.view_as_complex(qk.float().reshape(*qk.shape[:-1], D // 2, 2))
        qk = torch.view_as_real(pairs * turns).flatten(-2).to(qkv.dtype)
        return qk[..., :H, :], torch.cat([qk[..., H:, :], qkv[..., H + K :, :]], -2)

    def _rest(self, layer: LayerWeights, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP, both with their residual."""
        x = x + F.linear(mixed, layer.out, layer.out_bias)
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.arch.hidden_size,), weight, self.arch.norm_eps)
