"""A mechanism of your own: registered by name, it works in `convert`, in models, recipes and accounting.

    python examples/own_mechanism.py

This one is linear attention with elu(x) + 1 as its feature map (Katharopoulos et al. 2020).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import ecoformer
from ecoformer.operations import Operations, Product


@ecoformer.register_attention("elu")
class EluAttention(ecoformer.Attention):
    """Projections, checks, dropout and the local branch are the base class's; `attend` is ours."""

    supports_causal = False  # a call with is_causal=True is refused in one clear line
    supports_padding = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Heads (B, H, N, head_dim) in, heads out."""
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if key_padding_mask is not None:
            k = k.masked_fill(key_padding_mask[:, None, :, None], 0)
        return (q @ (k.mT @ v)) / (q @ k.sum(-2, keepdim=True).mT)

    def operations(self, batch: int, tokens: int) -> Operations:
        """What the paper's accounting counts; the exact accounting needs nothing."""
        heads, channels = batch * self.num_heads, self.head_dim
        return [
            Product(channels, tokens, channels + 1, heads),
            Product(tokens, channels, channels + 1, heads),
        ]


def main() -> dict[str, float]:
    """Returns the energy of one text with each mechanism in mJ."""
    encoder = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
    found = {"native": ecoformer.cost(model, (1, 4096, 64)).energy_pj / 1e9}
    print(ecoformer.convert(model, "elu"))
    assert model(torch.randn(2, 100, 64)).shape == (2, 100, 64)
    found["elu"] = ecoformer.cost(model, (1, 4096, 64)).energy_pj / 1e9
    return found


if __name__ == "__main__":
    for name, energy in main().items():
        print(f"{name:>7}: {energy:.2f} mJ")
