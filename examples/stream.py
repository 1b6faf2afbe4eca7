"""Read a stream token by token through a causal layer, with a state of fixed size.

    python examples/stream.py

A softmax layer would keep every key and value it has seen.
"""

import torch

import ecoformer


class StreamingLayer:
    """A `sharp_eco` layer that remembers the stream instead of taking all tokens at once."""

    def __init__(self, layer: ecoformer.Attention) -> None:
        self.layer = layer
        self.state: torch.Tensor | None = None  # (B, H, G 2^s, D + 1), sums over the keys seen so far

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The next tokens (B, n, dim); returns what the causal layer gives for them."""
        layer = self.layer
        q, k = layer.qk(x).chunk(2, dim=-1)  # projections whose signs are the codes
        q, k, v = (part.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for part in (q, k, layer.v(x)))
        affinity, weight = layer.affinity(q.shape[-1]), layer.key_weights(x)
        options = {"key_weight": weight, "is_causal": True, "state": self.state, "return_state": True}
        out, self.state = ecoformer.hash_attention(q, k, v, affinity, **options)
        return layer.proj(out.transpose(1, 2).flatten(2))


def main(tokens: int = 2000) -> dict[str, float]:
    """Returns the sizes of both memories, and the largest difference from the causal layer."""
    torch.manual_seed(0)
    layer = ecoformer.create_attention("sharp_eco", dim=64, num_heads=2).eval()
    x = torch.randn(1, tokens, 64)
    stream = StreamingLayer(layer)
    parts = [stream(x[:, : tokens // 2])]  # a long beginning at once
    parts += [stream(token) for token in x[:, tokens // 2 :].split(1, dim=1)]  # then one by one
    with torch.inference_mode():
        expected = layer(x, is_causal=True)
    return {
        "numbers that the state holds": stream.state.numel(),
        "numbers that softmax would keep": 2 * tokens * 64,
        "largest difference": (torch.cat(parts, dim=1) - expected).abs().max().item(),
    }


if __name__ == "__main__":
    for name, figure in main().items():
        print(f"{name}: {figure:.6g}")
