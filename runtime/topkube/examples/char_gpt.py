"""A small GPT that learns to write Python, from the source of Python's own standard library. Nothing is downloaded.

python -m topkube.examples.char_gpt                        # alone
mpiexec -n 4 python -m topkube.examples.char_gpt           # on 4 ranks
topkube run job.yaml                                       # on workers x slots, with progress and a plot
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import topkube
from topkube.examples.options import add_common_options, parse_positive, read_aggregation, set_threads

VOCABULARY = 128  # ASCII


class CharacterWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` characters, and the characters to predict: the same window, moved by one character. The last
    tenth of the text is held out."""

    def __init__(self, context: int, held_out: bool = False, characters: int = 4_000_000) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)[:characters]
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=VOCABULARY - 1)
        border = len(codes) * 9 // 10
        self.codes = codes[border:] if held_out else codes[:border]
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.codes[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each applied to the normalized input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (B, T, C)
        B, T, C = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(B, T, 3, self.heads, C // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, C / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(B, T, C))
        mapped: torch.Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + mapped


class GPT(nn.Module):
    """Predicts the next character. Returns the mean cross-entropy in nats per character."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, codes: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # both (B, T)
        x = self.characters(codes) + self.positions.weight[: codes.shape[1]]  # (B, T, C)
        logits = self.head(self.norm(self.blocks(x)))  # (B, T, VOCABULARY)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def compute_held_out_loss(model: GPT, context: int, windows: int = 256) -> float:
    """Return the mean loss of `windows` windows, spread over the held-out text."""
    dataset = CharacterWindows(context, held_out=True)
    chosen = torch.linspace(0, len(dataset) - 1, min(windows, len(dataset))).long().tolist()
    model.eval()
    device = next(model.parameters()).device
    losses = [model(*(part[None].to(device) for part in dataset[index])).item() for index in chosen]
    model.train()
    return float(sum(losses) / len(losses))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("char_gpt", description="Train a small GPT on Python's standard library.")
    add_common_options(parser, steps=200, batch_size=8, optimizer="adamw")
    parser.add_argument("--layers", type=parse_positive, default=4, help="transformer blocks (%(default)s)")
    parser.add_argument(
        "--width", type=parse_positive, default=128, help="features, a multiple of --heads (%(default)s)"
    )
    parser.add_argument("--heads", type=parse_positive, default=4, help="attention heads (%(default)s)")
    parser.add_argument("--context", type=parse_positive, default=128, help="characters of context (%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")

    topkube.init()
    set_threads()
    torch.manual_seed(args.seed)

    device = topkube.device()
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    topkube.broadcast_parameters(model)
    if args.optimizer == "sgd":
        plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate or 0.1, momentum=0.9)
    else:
        plain = torch.optim.AdamW(model.parameters(), lr=args.learning_rate or 1e-3)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), **read_aggregation(args))

    dataset = CharacterWindows(args.context)
    sampler = topkube.data.DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    with topkube.checkpointing(model, optimizer, sampler) as run:
        for codes, targets in run.progress(loader, total=args.steps):
            loss = model(codes.to(device), targets.to(device))
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    with optimizer.consensus():
        if topkube.rank() == 0:
            count = sum(parameter.numel() for parameter in model.parameters())
            held_out = compute_held_out_loss(model, args.context)
            print(f"{count:,} parameters after {run.step} steps: held-out loss {held_out:.4f} nats per character")


if __name__ == "__main__":
    main()
