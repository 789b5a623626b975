"""A small CNN for handwritten digits, written for Horovod: only the import of Horovod has changed.

mpips run -w 4 examples/horovod_digits.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpips.horovod.torch as hvd
from task import digits


def main(epochs: int, batch_size: int, learning_rate: float, fp16: bool) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    x, y, test_x, test_y = (torch.from_numpy(array) for array in digits("float32"))
    train = TensorDataset(x.view(-1, 1, 8, 8), y.long())
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=batch_size, sampler=sampler)

    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if fp16 else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
        own = slice(hvd.rank(), None, hvd.size())
        with torch.no_grad():
            right = (model(test_x.view(-1, 1, 8, 8)[own]).argmax(1) == test_y[own]).sum()
        total = hvd.allreduce(right, name="right", op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {total / len(test_y):.1%} of the test images right", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--fp16", action="store_true", help="send gradients as float16")
    main(**vars(parser.parse_args()))
