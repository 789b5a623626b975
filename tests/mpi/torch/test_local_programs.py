"""LocalSGD in programs as users write them: odd models, odd numbers of batches, states saved at any step."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpips.torch
from mpips.optimizers import SGD
from mpips.training.local import OUTER
from tests.mpi.torch.local_sgd import local
from tests.mpi.torch.support import heard, network, on_workers

WORLD = MPI.COMM_WORLD
STEPS = 11
LETTERS = 7
OPTIONS = pytest.mark.parametrize("options", [{}, {"servers": 1}], ids=str)


class Characters(nn.Module):
    """Guess the next character. It has tied weights, a frozen table, buffers, a number, and what gets no gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.norm = nn.Embedding(LETTERS, 6), nn.BatchNorm1d(6)
        self.places = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.last = nn.Linear(6, LETTERS)
        self.last.weight = self.table.weight
        self.unused, self.warmth = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(1.0))
        self.to(dtype)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden = (self.table(letters) + self.places).tanh().mean(1)
        logits: torch.Tensor = self.last(self.norm(hidden) * self.warmth)
        return logits


def text(step: int, rank: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return letters (5, 4), and what follows each."""
    letters = torch.randint(LETTERS, (5, 4), generator=torch.Generator().manual_seed(1000 * step + 10 * rank + part))
    return letters, (letters.sum(1) + rank) % LETTERS


class Loop:
    """One worker's program: gradient accumulation, a schedule of the inner rate, and clipping."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.model = Characters(dtype)
        self.inner = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.inner, STEPS)

    def backward(self, step: int, rank: int) -> None:
        self.inner.zero_grad()
        for part in range(2):
            letters, following = text(step, rank, part)
            (nn.functional.cross_entropy(self.model(letters), following) / 2).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def train(self, trainer: Any, last: int) -> None:
        while trainer.steps < last:
            self.backward(trainer.steps + 1, trainer.store.rank)
            trainer.step(**({"tokens": 3 + trainer.store.rank} if trainer._by_tokens else {}))
            self.schedule.step()

    def state(self, trainer: Any) -> list[Any]:
        """Return all that a user saves, in the order that is least kind."""
        model = copy.deepcopy(self.model.state_dict())
        return [copy.deepcopy(one) for one in (model, trainer.state_dict(), self.schedule.state_dict())]

    def load(self, trainer: Any, state: list[Any]) -> None:
        self.model.load_state_dict(state[0])
        trainer.load_state_dict(state[1])
        self.schedule.load_state_dict(state[2])

    def bits(self) -> bytes:
        return b"".join(one.detach().double().numpy().tobytes() for one in self.model.state_dict().values())


@OPTIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.mpi(min_size=2)
def test_every_kind_of_parameter_is_as_in_a_serial_run(dtype: torch.dtype, options: dict[str, Any]) -> None:
    with on_workers(options):
        loop, every = Loop(dtype), 3
        trainer = mpips.torch.LocalSGD(loop.model, loop.inner, every=every, **options)
        loop.train(trainer, 9)
        rank, workers = trainer.store.rank, trainer.store.num_workers
        trainer.close()
        loops = [Loop(dtype) for _ in range(workers)]
        views = [[p.detach().numpy() for p in one.model.parameters() if p.requires_grad] for one in loops]
        centers, outer = [view.copy() for view in views[0]], replace(OUTER["nesterov"], rescale=1 / workers)
        states = [outer.init(center.reshape(-1)) for center in centers]
        for step in range(1, 10):
            for number, one in enumerate(loops):
                one.backward(step, number)
                one.inner.step()
                one.schedule.step()
            for place, center in enumerate(centers) if step % every == 0 else ():
                total = center - views[0][place]
                for view in views[1:]:
                    total = total + (center - view[place])
                outer.update(center.reshape(-1), np.asarray(total).reshape(-1), states[place], step // every)
                for view in views:
                    view[place][...] = center
        assert loop.bits() == loops[rank].bits()


@OPTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.mpi(min_size=2)
def test_parameters_of_16_bits_are_equal_on_all_workers(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A state of them goes on with the same bits, too."""
    found = []
    for resumed in (False, True):
        with on_workers(options):
            model = network(dtype)
            trainer = mpips.torch.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), every=2, **options)
            workers = trainer.store.layout.workers
            for step in range(1, 7):
                for parameter in model.parameters():
                    generator = torch.Generator().manual_seed(10 * step + trainer.store.rank)
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
                trainer.step()
                if resumed and step == 3:
                    state = copy.deepcopy(model.state_dict()), copy.deepcopy(trainer.state_dict())
                    trainer.load_state_dict(state[1])
                    model.load_state_dict(state[0])
            values = [p.detach().float().numpy().tobytes() for p in model.parameters()]
            assert all(one == values for one in workers.allgather(values))
            found.append(values)
            trainer.close()
    assert len({*map(tuple, found)}) < 2


@OPTIONS
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"delay": 2},
        {"delay": 1, "keep": 0.5, "fragments": 2},
        {"compression": {"type": "int", "bits": 4}},
        {"by_tokens": True, "fragments": 3},
    ],
    ids=str,
)
@pytest.mark.mpi(min_size=2)
def test_a_state_of_any_step_goes_on_with_the_same_bits(more: dict[str, Any], options: dict[str, Any]) -> None:
    """Also of one in which an exchange is under way; and to save changes nothing."""
    whole, saving, states = b"", b"", {}
    with on_workers(options):
        loop = Loop()
        trainer = mpips.torch.LocalSGD(loop.model, loop.inner, every=4, **more, **options)
        loop.train(trainer, STEPS)
        trainer.close()
        whole = loop.bits()
    with on_workers(options):
        loop = Loop()
        trainer = mpips.torch.LocalSGD(loop.model, loop.inner, every=4, **more, **options)
        for step in range(STEPS + 1):
            loop.train(trainer, step)
            if 4 < step < 9:
                states[step] = loop.state(trainer)
        trainer.close()
        saving = loop.bits()
    assert saving == whole
    for step in (5, 6, 7, 8):
        with on_workers(options):
            loop = Loop()
            trainer = mpips.torch.LocalSGD(loop.model, loop.inner, every=4, **more, **options)
            loop.load(trainer, states[step])
            assert trainer.steps == step
            loop.train(trainer, STEPS)
            trainer.close()
            assert loop.bits() == whole, step


def counter(options: dict[str, Any], more: dict[str, Any]) -> tuple[Any, nn.ParameterList]:
    """Return a trainer of three parameters, which begin as zeros."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3)])
    trainer = mpips.torch.LocalSGD(model, torch.optim.SGD(model.parameters(), 1.0), **more, **options)
    return trainer, model


def centers_of(workers: int, every: int, fragments: int, delay: int, total: float, lengths: list[int]) -> list[float]:
    """Return what the outer parameters are where worker w adds 1 + w in each step, which `share` ends after so many.

    `total`: by how much the sum of all workers' changes counts."""
    centers, made, step = [0.0] * 3, [[0.0] * workers for _ in range(3)], 0
    taken: dict[tuple[int, int], None] = {}
    for length in lengths:
        for _ in range(length):
            step += 1
            for place, changes in enumerate(made):
                made[place] = changes = [change + 1 + worker for worker, change in enumerate(changes)]
                if taken.pop((place, step), 0) is None:
                    made[place] = [0.0] * workers
                if (step - ((place + 1) * every // 3 if fragments == 3 else 0)) % every == 0:
                    centers[place] += total * sum(made[place])
                    taken[place, step + delay] = None
                    if not delay:
                        made[place] = [0.0] * workers
        made, taken = [[0.0] * workers for _ in range(3)], {}
    return centers


@pytest.mark.parametrize(
    "options, more",
    [
        ({}, {}),
        ({"servers": 1}, {"fragments": 3}),
        ({}, {"delay": 1}),
        ({"servers": 1, "kind": "dist_async"}, {"outer": SGD(1.0)}),
        ({"servers": 1, "kind": "dist_async"}, {"outer": SGD(1.0), "delay": 1}),
        ({"servers": 1, "kind": "dist_async", "staleness": 1}, {"outer": SGD(1.0), "fragments": 3}),
        ({"servers": 1, "kind": "dist_async", "quorum": 99}, {"fragments": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [[6, 6], [8, 5], [1, 2, 1]], ids=str)
@pytest.mark.mpi(min_size=3)
def test_share_gives_all_workers_the_outer_parameters(
    options: dict[str, Any], more: dict[str, Any], lengths: list[int]
) -> None:
    """What steps have changed since the last exchange is dropped, and in nobody's next one."""
    workers = WORLD.size - options.get("servers", 0)
    options = {**options, **({"quorum": workers} if "quorum" in options else {})}
    with on_workers(options):
        trainer, model = counter(options, {"outer": "average", "every": 3, **more})
        alone = options.get("kind") == "dist_async" and "quorum" not in options
        for number, length in enumerate(lengths, 1):
            for _ in range(length):
                for parameter in model:
                    parameter.grad = torch.full_like(parameter, -1.0 - trainer.store.rank)
                trainer.step()
            trainer.share()
            values = [parameter.tolist() for parameter in model]
            total = 1.0 if alone else 1 / workers
            expected = centers_of(workers, 3, more.get("fragments", 1), more.get("delay", 0), total, lengths[:number])
            assert np.abs(np.array(values) - np.array(expected)[:, None]).max() < 1e-12, (values, expected)
            assert all(one == values for one in trainer.store.layout.workers.allgather(values))
        trainer.close()


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"servers": 1}),
        ({"servers": 1}, {}),
        ({"servers": 2}, {"servers": 1}),
    ],
)
@pytest.mark.mpi(min_size=3)
def test_a_state_goes_on_with_the_mean_over_other_workers(first: dict[str, Any], second: dict[str, Any]) -> None:
    state: list[Any] = []
    center = 0.0
    for options in (first, second):
        workers = WORLD.size - options.get("servers", 0)
        with on_workers(options):
            trainer, model = counter(options, {"outer": "average", "every": 3})
            if state:
                model.load_state_dict(state[0])
                trainer.load_state_dict(state[1])
            for _ in range(3):
                for parameter in model:
                    parameter.grad = torch.full_like(parameter, -1.0 - trainer.store.rank)
                trainer.step()
            center += 3 * (workers + 1) / 2
            assert all(abs(value - center) < 1e-12 for parameter in model for value in parameter.tolist())
            state = copy.deepcopy([model.state_dict(), trainer.state_dict()])
            trainer.close()
        state, center = WORLD.bcast((state, center))


@pytest.mark.parametrize("options", [{}, {"servers": 1}, {"servers": 1, "kind": "dist_async", "quorum": 99}], ids=str)
@pytest.mark.mpi(min_size=3)
def test_a_worker_without_tokens_counts_for_nothing_whatever_it_has(options: dict[str, Any]) -> None:
    """Its batch was empty, and its loss NaN."""
    workers = WORLD.size - options.get("servers", 0)
    options = {**options, **({"quorum": workers} if "quorum" in options else {})}
    with on_workers(options):
        trainer, model = counter(options, {"outer": "average", "every": 1, "by_tokens": True})
        odd = trainer.store.rank == workers - 1
        for parameter in model:
            parameter.grad = torch.full_like(parameter, float("nan") if odd else -2.0)
        trainer.step(tokens=0 if odd else 5)
        trainer.share()
        trainer.close()
        assert [parameter.tolist() for parameter in model] == [[2.0, 2.0]] * 3


@OPTIONS
@pytest.mark.parametrize("way", ["unfrozen", "another", "added"])
@pytest.mark.mpi(min_size=2)
def test_what_inner_trains_is_exchanged_or_refused(way: str, options: dict[str, Any]) -> None:
    with on_workers(options):
        model, other = network(), nn.Linear(3, 2).double()
        model[2].requires_grad_(False)  # type: ignore[index]
        inner = torch.optim.SGD([*model.parameters(), *(other.parameters() if way == "another" else ())], 0.1)
        made: list[Any] = []
        said = heard(lambda: made.append(mpips.torch.LocalSGD(model, inner, every=2, **options)))
        if way != "another":
            trainer = made[0]
            trainer.step()
            if way == "unfrozen":
                model[2].requires_grad_(True)  # type: ignore[index]
            else:
                inner.add_param_group({"params": list(other.parameters())})
            assert not said
            said = heard(trainer.step)
            assert trainer.steps == 1
            trainer.close()
        names = {
            "unfrozen": "2.weight, (16, 16)",
            "another": "6 of group 0 of inner, which the model lacks, (2, 3)",
            "added": "0 of group 1 of inner, which the model lacks, (2, 3)",
        }
        assert f"inner trains parameter {names[way]}, and workers do not exchange it: make LocalSGD" in said


@OPTIONS
@pytest.mark.mpi(min_size=3)
def test_states_that_do_not_fit_are_refused_on_all_workers(options: dict[str, Any]) -> None:
    done = local(options, steps=3, every=4, fragments=2)
    if done is None:
        return
    trainer = done[0]
    rank, workers = trainer.store.rank, trainer.store.layout.workers
    state = trainer.state_dict()
    fewer = {**state, "since": state["since"][:1]}
    for given, sentence in (
        (fewer, "saved with fragments=1, and this LocalSGD has 2"),
        (fewer if rank else state, "saved with fragments=1"),
        ({} if rank else state, "there is no 'inner', 'steps'"),
        ({**state, "steps": 3 + rank}, "steps"),
    ):
        said = heard(lambda given=given: trainer.load_state_dict(given))
        assert all(sentence in one for one in workers.allgather(said)), said
    trainer.load_state_dict(state)
    trainer.close()


UNLIKE = {"closes": (7, 12), "shares": (8, 12), "saves": (6, 12)}
"""What worker 0 does, after how many steps, where the others make so many."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"servers": 1},
        {"delay": 2},
        {"servers": 1, "kind": "dist_async"},
        {"servers": 1, "kind": "dist_async", "quorum": 99},
    ],
    ids=str,
)
@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.mpi(min_size=3)
def test_unlike_numbers_of_steps_hang_nobody(what: str, options: dict[str, Any]) -> None:
    """In a synchronous store the others hear at once who does not come; in an asynchronous one they get through."""
    workers = WORLD.size - options.get("servers", 0)
    options = {**options, **({"quorum": workers} if "quorum" in options else {})}
    few, many = UNLIKE[what]
    done, said = local({"timeout_seconds": 20, **options}, steps=0, every=4), ""
    if done is not None:
        trainer, _ = done
        odd = trainer.store.rank == 0

        def work() -> None:
            for _ in range(few if odd else many):
                trainer.step()
            if odd and what == "saves":
                trainer.state_dict()
            if odd and what == "shares":
                trainer.share()
            trainer.close()

        said = heard(work)
        heard(trainer.store.close)
    first, *others = WORLD.allgather(said)[:workers]
    assert "StallError" not in first + "".join(others), (first, others)
    if options.get("kind") == "dist_async":
        assert not any(others) and ("has closed its store" in first) == (what != "closes"), (first, others)
    else:
        assert all("rank 0" in one for one in others) and bool(first) == (what == "saves"), (first, others)
