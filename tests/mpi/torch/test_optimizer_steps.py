"""DistributedOptimizer where programs do not all do the same: it is right, or all raise one sentence.

Parameters without a gradient, steps that a worker leaves out, numbers, parameters and calls of one worker alone.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from mpips.torch.optimizer import consensus
from tests.mpi.torch.support import PAIRS, SERVED, SERVERLESS, WORLD, Words, alike, heard, on_workers, rows, wrapped

STORES: list[dict[str, Any]] = [
    SERVERLESS,
    SERVED,
    SERVED | {"shared_memory": False},
    {"kind": "mpi_sync", "servers": 1, "masters": "all"},
    {"kind": "mpi_async", "servers": 1},
    {"kind": "mpi_async", "servers": 1, "shared_memory": False},
]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.Adamax, {"lr": 0.05, "weight_decay": 0.1}),  # runs on the workers
]


def apart(model: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# ---- gradients that not all have


class Branches(nn.Module):
    """Parts that not every step, and not every worker, uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.late, self.odd, self.frozen, self.thawed = (nn.Linear(4, 1).double() for _ in range(5))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.frozen.requires_grad_(False)

    def before(self, step: int) -> None:
        """Freeze and unfreeze, as a program does before a step."""
        self.thawed.requires_grad_(step >= 2)
        self.scale.requires_grad_(step != 3)

    def loss(self, step: int, rank: int) -> Any:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        out = self.always(x) * self.scale + self.frozen(x) + self.thawed(x)
        if step in (1, 2):
            out = out + self.late(x)
        if rank % 2 and step % 2:
            out = out + self.odd(x)
        return out.pow(2).mean()


CASES = [(kind, numbers, SERVED) for kind, numbers in OPTIMIZERS]
CASES += [(*OPTIMIZERS[1], options) for options in STORES if options != SERVED] + [(*OPTIMIZERS[5], SERVERLESS)]


@pytest.mark.parametrize("kind, numbers, options", CASES)
def test_a_parameter_without_a_gradient_stays_as_it_is(kind: Any, numbers: Any, options: dict[str, Any]) -> None:
    with on_workers(options):
        model, plain = Branches(), Branches()
        optimizer = wrapped(model, kind(model.parameters(), **numbers), options)
        for step in range(5):
            model.before(step)
            optimizer.zero_grad()
            model.loss(step, optimizer.store.rank).backward()
            optimizer.step()
        workers = optimizer.store.num_workers
        optimizer.close()
        alone = kind(plain.parameters(), **numbers)
        for step in range(5):  # the mean of all workers' gradients, None where none of them has one
            plain.before(step)
            alone.zero_grad()
            for rank in range(workers):
                plain.loss(step, rank).backward()
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.grad /= workers
            alone.step()
        assert apart(model, plain) < 1e-12


def test_a_worker_that_waits_for_nobody_moves_only_what_it_uses() -> None:
    """A gradient of one worker alone is not held back until others have one, too."""
    options = {"kind": "dist_async", "servers": 1, "staleness": 1}
    with on_workers(options):
        model = nn.ModuleDict({"all": nn.Linear(1, 1, bias=False), "one": nn.Linear(1, 1, bias=False)})
        for parameter in model.parameters():
            parameter.data.fill_(5.0)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 1.0), options)
        for _ in range(6):
            optimizer.zero_grad()
            out = model["all"](torch.ones(1, 1)) + (model["one"](torch.ones(1, 1)) if optimizer.store.rank == 0 else 0)
            out.backward()
            optimizer.step()
        optimizer.store.barrier()
        values = [torch.zeros(1, 1), torch.zeros(1, 1)]
        optimizer.store.pull(["all.weight", "one.weight"], values)
        workers = optimizer.store.num_workers
        optimizer.close()
        assert [float(value) for value in values] == [5 - 6 * workers, -1]


@PAIRS
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_train_alike(kind: Any, options: dict[str, Any]) -> None:
    with on_workers(options):
        model, plain = Words(), Words()
        only = [one.table if kind is torch.optim.SparseAdam else one for one in (model, plain)]
        optimizer, alone = wrapped(only[0], kind(only[0].parameters(), 0.1), options), kind(only[1].parameters(), 0.1)
        workers = optimizer.store.num_workers
        for step in range(4):
            optimizer.zero_grad()
            (model(rows(step, optimizer.store.rank)) * (step != 2)).backward()  # rows of zeros are rows
            optimizer.step()
            alone.zero_grad()
            (sum(plain(rows(step, rank)) for rank in range(workers)) / workers * (step != 2)).backward()
            alone.step()
        optimizer.close()
        assert apart(model, plain) < 1e-12


def test_adam_takes_no_sparse_gradients() -> None:
    with on_workers(SERVED):
        model = Words()
        optimizer = wrapped(model, torch.optim.Adam(model.parameters(), 0.1), SERVED)
        model(rows(0, 0)).backward()
        said = heard(optimizer.step)
        optimizer.close()
        assert "'table.weight' has a sparse gradient, which Adam does not take" in said


@pytest.mark.parametrize("options", [SERVERLESS, SERVED, {"kind": "mpi_async", "servers": 1}], ids=str)
@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_of_one_worker_skips_the_step_of_all(options: dict[str, Any], clips: bool) -> None:
    """As with DDP: weights at each step, and GradScaler's scale, are equal on all workers."""
    seen: list[Any] = []
    expected: list[Any] = []
    with on_workers(options):
        torch.manual_seed(0)
        model, plain = nn.Linear(2, 1), nn.Linear(2, 1)
        plain.load_state_dict(model.state_dict())
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), options)
        alone = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        rank, workers, scale = optimizer.store.rank, optimizer.store.num_workers, 16.0
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        for step in range(6):
            bad = (step in (1, 2) and (step - 1) % workers == rank) or step == 4
            optimizer.zero_grad()
            if rank == 0 or step != 5:  # in the last step worker 0 alone has a gradient
                scaler.scale(model(torch.full((4, 2), step + 1.0)).mean() * (math.inf if bad else 1.0)).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append((step, scaler.get_scale(), model.weight.tolist()))
            skipped = step in (1, 2, 4)
            if not skipped:
                alone.zero_grad()
                (plain(torch.full((4, 2), step + 1.0)).mean() * (1 if step != 5 else 1 / workers)).backward()
                alone.step()
            scale *= 0.5 if skipped else 1.0
            expected.append((step, scale, plain.weight.tolist()))
        optimizer.close()
    everybody = [one for one in WORLD.allgather(seen) if one]
    assert all(one == everybody[0] for one in everybody)
    for mine, theirs in zip(seen, expected):
        assert mine[:2] == theirs[:2] and torch.allclose(torch.tensor(mine[2]), torch.tensor(theirs[2])), (mine, theirs)


# ---- one sentence for all


def one_sentence(sentence: str | None) -> str:
    """Return what all workers have heard; servers bring None. Collective."""
    everybody = {each for each in WORLD.allgather(sentence) if each is not None}
    assert len(everybody) == 1, everybody
    return everybody.pop()


@PAIRS
def test_all_hear_of_a_step_that_one_leaves_out(options: dict[str, Any]) -> None:
    """`continue` on a loss that is no number. A worker without a batch may step without a gradient instead."""
    sentence, right = None, True
    with on_workers(options, 2):
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(0.0)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 1.0), options)
        rank, workers = optimizer.store.rank, optimizer.store.num_workers
        optimizer.zero_grad()
        if rank:
            model(torch.ones(1, 1)).backward()
        optimizer.step()
        right = abs(float(model.weight) + (workers - 1) / workers) < 1e-6

        def program() -> None:
            for step in range(3):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 1)) * (math.nan if rank < 2 and step == 2 - rank else 1.0)
                if not torch.isfinite(loss):
                    continue
                loss.backward()
                optimizer.step()

        sentence = heard(program)
        optimizer.close()
    said = one_sentence(sentence)
    assert right and "step 3: the number of zero_grad() calls since the last step is 1 on rank 0 and 2 on" in said, said


@PAIRS
def test_all_hear_of_a_rate_of_one_alone(options: dict[str, Any]) -> None:
    sentence = None
    with on_workers(options, 2):
        model = nn.Linear(2, 1)
        optimizer = wrapped(model, torch.optim.Adam(model.parameters(), 0.5), options)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

        def program() -> None:
            for step in range(4):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
                plateau.step(float(step) if optimizer.store.rank else -float(step))

        sentence = heard(program)
        optimizer.close()
    assert "step 3: 'lr' of group 0 is 0.5 on rank 0 and 0.05 on rank 1" in one_sentence(sentence)


@pytest.mark.parametrize("options", [SERVERLESS, SERVED, {"kind": "dist_async", "servers": 1}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
def test_all_hear_of_numbers_that_differ_at_first(kind: Any, options: dict[str, Any]) -> None:
    sentence = None
    with on_workers(options, 2):
        model, decay = nn.Linear(2, 1), 0.0 if WORLD.rank else 0.5
        sentence = heard(lambda: wrapped(model, kind(model.parameters(), 0.5, weight_decay=decay), options))
    said = one_sentence(sentence)
    assert "weight_decay" in said and "0.5 on rank 0" in said and "0.0 on rank 1" in said


@PAIRS
def test_all_hear_of_calls_of_one_worker_alone(tmp_path: Any, options: dict[str, Any]) -> None:
    """`if rank == 0: torch.save(optimizer.state_dict())` and its like: a sentence at once, or it needs one worker."""
    said: dict[str, str] | None = None
    with on_workers(options, 2):
        model, said = nn.Linear(2, 1), {}
        optimizer = wrapped(model, torch.optim.Adam(model.parameters(), 0.5), options)
        first = optimizer.store.rank == 0

        def step() -> None:
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()

        step()
        state = optimizer.state_dict()
        calls = {
            "set_parameters": optimizer.set_parameters,
            "save": lambda: optimizer.save(tmp_path / "a"),
            "load_state_dict": lambda: optimizer.load_state_dict(state),
        }
        if optimizer.on_servers:
            calls["state_dict"] = optimizer.state_dict
        elif first:
            optimizer.state_dict()
        for name, call in calls.items():
            said[name] = heard(call if first else step)
        said["barrier"] = heard(optimizer.store.barrier if first else step)
        optimizer.close()
    everybody = [one for one in WORLD.allgather(said) if one]
    assert all(one == everybody[0] for one in everybody), everybody
    barrier = everybody[0].pop("barrier")
    # On three ranks the sentence may name the second or the third.
    assert re.search(r"rank 0 calls barrier of the store; rank \d calls step 2 of a DistributedOptimizer: let", barrier)
    for name, sentence in everybody[0].items():
        others = r"(rank 1 calls|ranks 1, 2 call) step after step 1: let all ranks make"
        assert re.search(rf"rank 0 calls {name} after step 1; {others}", sentence)


def test_all_hear_of_parameters_that_one_alone_changes() -> None:
    """Its loads are heard of; what it puts back is not."""
    said = []
    with on_workers(SERVERLESS, 2):
        model = nn.Linear(2, 1)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.5), SERVERLESS)

        def step() -> str:
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            return heard(optimizer.step)

        said.append(step())
        if WORLD.rank == 0:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 0.9 for name, value in kept.items()})
            model.load_state_dict(kept)
        said.append(step())
        if WORLD.rank == 0:
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        said.append(step())
        optimizer.set_parameters()
        said.append(step())
        optimizer.close()
    assert alike(said) and said[0] == said[1] == said[3] == ""
    assert "'weight' is not the same on rank 0 and rank 1: " in said[2] and "set_parameters()" in said[2]


@pytest.mark.parametrize("options", [SERVERLESS, SERVED, {"kind": "dist_async", "servers": 1}], ids=str)
def test_words_in_a_group_are_equal_on_all_workers(options: dict[str, Any]) -> None:
    """Functions, sets and objects are another address and another hash in each process."""
    words = {"schedule": lambda step: step, "tags": {"a", "b", "c"}, "owner": object(), "name": None}
    with on_workers(options, 2):
        model = nn.Linear(2, 1)
        inner = torch.optim.Adam(model.parameters(), 0.5)
        inner.param_groups[0].update(words)
        optimizer = wrapped(model, inner, options)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        optimizer.close()


def test_workers_that_differ_without_words_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = None
    with on_workers(SERVERLESS, 2):
        model = nn.Linear(2, 1)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.5), SERVERLESS)
        model(torch.ones(3, 2)).sum().backward()
        monkeypatch.setattr(consensus, "digest", lambda data: WORLD.rank)
        sentence = heard(optimizer.step)
        optimizer.close()
    assert "ranks differ in what they have done, and no word of theirs says in what" in one_sentence(sentence)


@PAIRS
@pytest.mark.parametrize("back", ["subtracted", "data", "copied"])
def test_parameters_that_each_worker_moves_back_train_as_if_they_had_stayed(back: str, options: dict[str, Any]) -> None:
    with on_workers(options, 2):
        model, plain = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1), options)
        plain.load_state_dict(model.state_dict())
        alone = torch.optim.SGD(plain.parameters(), 0.1)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + optimizer.store.rank)
            moves = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            kept = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for parameter, move, old in zip(model.parameters(), moves, kept):
                    target = parameter.data if back == "data" else parameter
                    target.add_(move)
                    target.copy_(old) if back == "copied" else target.sub_(move)
            for one, stepped in ((model, optimizer), (plain, alone)):
                stepped.zero_grad()
                one(torch.ones(3, 2)).sum().backward()
                stepped.step()
        optimizer.close()
        assert apart(model, plain) < 1e-5
