"""DiLoCo: train a small transformer with workers that exchange parameters every 25 steps, and that survive deaths.

mpips run -w 4 -s 1 --spares 1 examples/diloco.py --steps 300
mpips run -w 4 examples/diloco.py --every 50 --fragments 2 --delay 5
mpips run -w 4 -s 1 examples/diloco.py --quorum 3 --grace-seconds 0.2 --step-seconds 0.05 --slow 3
mpips chaos --faults 4 --every 10 -- mpips run -w 4 -s 1 --spares 4 examples/diloco.py --steps 1000

The model and its text are those of torch_language.py. Every worker reads different parts of the text. The program
prints the loss of the parameters on the server, in nats per letter, on a part of the text that no worker trains on.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import mpips.chaos
import mpips.torch
from torch_language import LENGTH, Language, letters

# number of test windows
TESTED = 32


def loss_at(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    """Return the loss of predicting each next letter, in the windows of the text that begin at `starts`."""
    batch = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """Split the text into the part to train on and the part to test with."""
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:]


def test_loss(model: nn.Module, test: Tensor) -> float:
    """Return the loss on windows that are spread evenly over the test part."""
    with torch.no_grad():
        return loss_at(model, test, torch.linspace(0, len(test) - LENGTH - 1, TESTED).long()).item()


def batch_of(step: int, rank: int, text: Tensor, batch_size: int) -> Tensor:
    """Return the starts of a worker's windows in a step. A spare that replaces the worker gets the same windows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(len(text) - LENGTH, (batch_size,), generator=generator)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, count = letters()
    text, test = split(text)
    model = Language(count, layers=1)
    inner = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    local = {"every": options.every, "fragments": options.fragments, "delay": options.delay}
    if options.quorum is not None:
        local |= {"kind": "dist_async", "quorum": options.quorum, "grace_seconds": options.grace_seconds}
    trainer = mpips.torch.LocalSGD(model, inner, **local)
    start, first = time.perf_counter(), trainer.steps
    while trainer.steps < options.steps:
        rank = trainer.store.rank
        mpips.chaos.note(trainer.steps, trainer.steps)
        trainer.zero_grad()
        loss_at(model, text, batch_of(trainer.steps, rank, text, options.batch_size)).backward()
        time.sleep(options.step_seconds * (options.slow if rank == trainer.store.num_workers - 1 else 1))
        trainer.step()
        if rank == 0 and trainer.steps % options.every == 0:
            seconds = time.perf_counter() - start
            print(
                f"step {trainer.steps}: loss {test_loss(model, test):.3f}, {seconds:.1f} s from step {first} on",
                flush=True,
            )
    trainer.share()
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small language model by DiLoCo.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--quorum", type=int, help="number of workers whose changes close a round; default: all")
    parser.add_argument(
        "--grace-seconds", type=float, default=0.0, help="time that a round then waits for the other workers"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="time that each step sleeps, to emulate a larger model"
    )
    parser.add_argument("--slow", type=float, default=1.0, help="the last worker sleeps this many times as long")
    main(parser.parse_args())
