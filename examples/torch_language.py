"""Train a small transformer on Python's own documentation, letter by letter, on 4 ranks.

mpips run -w 4 examples/torch_language.py --steps 100

The text comes with Python (`pydoc_data.topics`). Every rank reads different parts of it. The loss is that of predicting
the next letter, in nats. It begins near the loss of a random guess among all letters.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import mpips.torch

# number of letters that the model sees at a time
LENGTH = 64


class Language(nn.Module):
    """A causal transformer from letters to the logits of the next letter."""

    def __init__(self, letters: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.positions = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.letters(x) + self.positions.weight[: x.shape[1]]
        return self.out(self.layers(hidden, mask=mask, is_causal=True))


def letters() -> tuple[Tensor, int]:
    """Return the text as numbers, and the size of its alphabet."""
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[letter] for letter in text]), len(alphabet)


def main(steps: int, batch_size: int, learning_rate: float) -> None:
    rank, ranks = mpips.rank(), mpips.size()
    torch.set_num_threads(1)
    text, count = letters()
    model = mpips.torch.DataParallel(Language(count))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(rank)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - LENGTH, (batch_size, 1), generator=generator)
        batch = text[starts + torch.arange(LENGTH + 1)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == 1):
            rate = step * ranks * batch_size * LENGTH / (time.perf_counter() - start)
            shown = f"loss {loss.item():.3f}, at random {math.log(count):.3f}"
            print(f"step {step}: {shown}, {rate:,.0f} letters a second", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small language model on Python's documentation.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    main(options.steps, options.batch_size, options.learning_rate)
