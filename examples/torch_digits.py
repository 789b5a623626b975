"""A small CNN for handwritten digits in PyTorch, data parallel in four ways.

mpips run -w 4 examples/torch_digits.py --way ddp             PyTorch's DistributedDataParallel with the backend "mpips"
mpips run -w 4 examples/torch_digits.py --way data-parallel   mpips.torch.DataParallel, which plans its buckets
mpips run -s 1 -w 4 examples/torch_digits.py --way sync       a parameter server: gradients in, parameters out
mpips run -s 1 -w 4 examples/torch_digits.py --way async      the same, but no worker waits for another
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpips.torch
from task import digits

WAYS = ("ddp", "data-parallel", "sync", "async")


def network() -> nn.Module:
    """Return a network of two convolutions and a dense layer, for images of 8 x 8 pixels."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 64, 10))


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training images and their digits, then the test images and their digits."""
    x, y, test_x, test_y = (torch.from_numpy(array) for array in digits("float32"))
    return x.view(-1, 1, 8, 8), y.long(), test_x.view(-1, 1, 8, 8), test_y.long()


def main(way: str, epochs: int, batch_size: int, learning_rate: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    if way == "ddp":
        dist.init_process_group("mpips")
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "data-parallel":
        model = mpips.torch.DataParallel(model)
    else:
        optimizer = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), kind=f"dist_{way}")
    train(model, optimizer, epochs, batch_size, mpips.rank(), mpips.size())
    if way == "ddp":
        dist.destroy_process_group()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, batch_size: int, rank: int, workers: int
) -> None:
    """Train, and print the test accuracy of every epoch. All four ways share this loop."""
    x, y, test_x, test_y = tensors()
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for epoch in range(1, epochs + 1):
        # All ranks have the same order, so that no two ranks train on the same image.
        order = torch.randperm(len(x), generator=generator)
        own = order[: len(x) // workers * workers][rank::workers]
        for batch in own.split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                right = (getattr(model, "module", model)(test_x).argmax(1) == test_y).float().mean()
            seconds = time.perf_counter() - start
            print(f"epoch {epoch}: {right:.1%} of the test images right, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a CNN on handwritten digits.")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    options = parser.parse_args()
    main(options.way, options.epochs, options.batch_size, options.learning_rate)
