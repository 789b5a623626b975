"""A job that trains one model by one wrapper, on any backend; one rank may fail in the middle.

mpips run -w 2 -m tests.mpi.torch.wrapped lightning mpips
mpips run -w 3 -m tests.mpi.torch.wrapped trainer mpips kill
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import collectives
import mpips.torch

WORLD = MPI.COMM_WORLD
ODD, STEP, STEPS, ENDLESS = 1, 5, 12, 10**6
"""The rank that fails and in which step; steps of a job, without and with a fault."""
BATCH, INPUTS, CLASSES = 4, 6, 3
After = Callable[[], None]
"""Is called after every step."""
Trained = tuple[nn.Module, dict[str, float]]
"""The model, and metrics over all ranks."""


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are made when they are asked for."""

    def __init__(self, steps: int) -> None:
        self._size = steps * BATCH * WORLD.size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(INPUTS, generator=generator), torch.tensor(number % CLASSES)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def loop(model: nn.Module, steps: int, after: After) -> Trained:
    """Train by the usual loop, with every batch of all ranks."""
    optimizer, data = torch.optim.SGD(model.parameters(), 0.1), Data(steps)
    for step in range(steps):
        first = (WORLD.size * step + WORLD.rank) * BATCH
        x, y = (torch.stack(each) for each in zip(*(data[first + number] for number in range(BATCH))))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        after()
    return model, {}


# ---- wrappers


def ddp(backend: str, steps: int, after: After) -> Trained:
    dist.init_process_group(backend)
    return loop(DistributedDataParallel(network()), steps, after)


def hook(backend: str, steps: int, after: After) -> Trained:
    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    model.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=2), power.powerSGD_hook)
    return loop(model, steps, after)


def fsdp(backend: str, steps: int, after: After) -> Trained:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend)
    return loop(fully_shard(network()), steps, after)


def data_parallel(backend: str, steps: int, after: After) -> Trained:
    return loop(mpips.torch.DataParallel(network()), steps, after)


def sparse(backend: str, steps: int, after: After) -> Trained:
    dist.init_process_group(backend)
    torch.manual_seed(1)
    model = nn.EmbeddingBag(50, CLASSES, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.arange(WORLD.rank, 8).view(1, -1)) ** 2).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        after()
    return model, {}


def lightning(backend: str, steps: int, after: After) -> Trained:
    """Lightning finds MPI's ranks by itself; torchmetrics are summed over all."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics.classification import MulticlassAccuracy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.accuracy = network(), MulticlassAccuracy(CLASSES, average="micro")

        def training_step(self, batch: Any, number: int) -> Tensor:
            x, y = batch
            out = self.body(x)
            loss = cross_entropy(out, y)
            self.accuracy(out, y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            after()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD.size,
        strategy=DDPStrategy(process_group_backend=backend),
        max_steps=steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = Module(), Data(steps)
    sampler = DistributedSampler(data, WORLD.size, WORLD.rank, shuffle=False)  # Lightning's own shuffles
    trainer.fit(model, DataLoader(data, BATCH, sampler=sampler))
    return model.body, {name: float(value) for name, value in trainer.callback_metrics.items()}


def accelerate(backend: str, steps: int, after: After) -> Trained:
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator, model = Accelerator(cpu=True), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(Data(steps), BATCH))
    right, total = 0, 0
    for x, y in data:
        optimizer.zero_grad()
        out = model(x)
        accelerator.backward(cross_entropy(out, y))
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        guessed, true = accelerator.gather_for_metrics((out.argmax(1), y))
        right, total = right + int((guessed == true).sum()), total + len(true)
        after()
    return accelerator.unwrap_model(model), {"accuracy": right / total}


def trainer(backend: str, steps: int, after: After) -> Trained:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.body(x)
            return {"loss": cross_entropy(out, labels), "logits": out}

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            after()

    def joined(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, labels = (torch.stack(each) for each in zip(*samples))
        return {"x": x, "labels": labels}

    dist.init_process_group(backend)
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=0.1,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=10.0,
            train_sampling_strategy="sequential",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        made = Trainer(Model(), arguments, joined, Data(steps), Data(steps), callbacks=[Steps()])
        made.train()
        return made.model.body, {"loss": made.evaluate()["eval_loss"]}


WRAPS = {each.__name__: each for each in (ddp, hook, fsdp, data_parallel, sparse, lightning, accelerate, trainer)}
NEEDS = {"lightning": ("lightning", "torchmetrics"), "accelerate": ("accelerate",), "trainer": ("transformers",)}
"""What is imported, beside PyTorch."""


# ---- faults


def happen(fault: str, wrap: str) -> None:
    """Fail on this rank."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sys.exit":
        sys.exit(4)
    if fault in ("caught", "exception"):
        raise RuntimeError("a bug of the user's")
    if fault == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if fault == "shape":  # on the communicator of the gradients
        (collectives.allreduce if wrap == "data_parallel" else dist.all_reduce)(torch.ones(7))


def say(**words: object) -> None:
    """Print one line of JSON."""
    print(json.dumps(words), flush=True)


def main(wrap: str, backend: str, fault: str = "") -> None:
    steps = [0]

    def after() -> None:
        steps[0] += 1
        if fault and WORLD.rank == ODD and steps[0] == STEP:
            say(fault=time.monotonic())
            happen(fault, wrap)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        model, metrics = WRAPS[wrap](backend, ENDLESS if fault else STEPS, after)
    except (Exception, KeyboardInterrupt) as error:
        say(heard=WORLD.rank, at=time.monotonic(), sentence=f"{type(error).__name__}: {error}")
        if fault == "caught" and WORLD.rank == ODD:
            return
        raise
    parameters = [getattr(p, "full_tensor", lambda p=p: p)().tolist() for p in model.parameters()]
    say(rank=WORLD.rank, steps=steps[0], backend=dist.get_backend(), parameters=parameters, metrics=metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
