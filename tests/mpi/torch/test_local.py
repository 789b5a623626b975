"""LocalSGD: workers train apart, and an outer optimizer joins them, bit for bit as in a serial run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpips.torch
from collectives.recorder import own as recorder
from collectives.recorder import page
from mpips.optimizers import SGD, Optimizer
from mpips.training.local import OUTER
from tests.mpi.torch.local_sgd import ADAMW, STEPS, local, loss_of
from tests.mpi.torch.support import batch, far, heard, joined_batch, network

WORLD = MPI.COMM_WORLD


def serial(workers: int, outer: Optimizer, every: int, keep: float = 0.0, delay: int = 0) -> list[nn.Module]:
    """Local SGD of one fragment, of so many workers in one process."""
    models = [network() for _ in range(workers)]
    inners = [torch.optim.AdamW(model.parameters(), **ADAMW) for model in models]
    views = [[p.detach().numpy() for p in model.parameters()] for model in models]
    centers = [view.copy() for view in views[0]]
    states = [outer.init(center.reshape(-1)) for center in centers]
    due: dict[int, list[np.ndarray]] = {}
    for step in range(1, STEPS + 1):
        for rank, (model, inner) in enumerate(zip(models, inners)):
            inner.zero_grad()
            loss_of(model, batch(step, rank=rank)).backward()
            inner.step()
        if step in due:
            mix(views, due.pop(step), keep)
        if step % every == 0:
            for place, center in enumerate(centers):
                total = center - views[0][place]
                for view in views[1:]:
                    total = total + (center - view[place])
                outer.update(center.reshape(-1), total.reshape(-1), states[place], step // every)
            if delay:
                due[step + delay] = [center.copy() for center in centers]
            else:
                mix(views, centers, keep)
    return models


def mix(views: list[list[np.ndarray]], centers: list[np.ndarray], keep: float) -> None:
    for view in views:
        for mine, center in zip(view, centers):
            mine[...] = mine + (center - mine) * (1.0 - keep) if keep else center


def exchanged() -> np.ndarray:
    """Return how many exchanges this rank's page counts, and their bytes."""
    return np.array([recorder.page.words[page.AT[name]] for name in ("exchanges", "exchanged_bytes")], np.int64)


def workers_of(options: dict[str, Any]) -> int:
    return WORLD.size - int(options.get("servers", 0))


OPTIONS = pytest.mark.parametrize("options", [{}, {"servers": 1}, {"kind": "mpi_sync"}], ids=str)


@OPTIONS
@pytest.mark.parametrize("outer", ["nesterov", "average", SGD(0.3, momentum=0.5)], ids=str)
@pytest.mark.mpi(min_size=2)
def test_parameters_have_the_bits_of_a_serial_run(outer: Any, options: dict[str, Any]) -> None:
    before = exchanged()
    done = local(options, outer=outer, every=4)
    if done is not None:
        trainer, model = done
        trainer.close()
        assert list(exchanged() - before) == [3, 3 * 2 * sum(p.nbytes for p in model.parameters())], "of 12 steps"
        whole = OUTER[outer] if isinstance(outer, str) else outer
        workers = workers_of(options)
        rescaled = SGD(whole.learning_rate, momentum=whole.momentum, nesterov=whole.nesterov, rescale=1 / workers)
        assert far(model, serial(workers, rescaled, 4)[trainer.store.rank]) == 0


@pytest.mark.parametrize("delay, keep", [(2, 0.0), (2, 0.5), (0, 0.25)])
@pytest.mark.mpi(min_size=2)
def test_an_exchange_travels_during_inner_steps(delay: int, keep: float) -> None:
    done = local({}, every=5, delay=delay, keep=keep, outer="average")
    assert done is not None
    trainer, model = done
    rescaled = SGD(1.0, rescale=1 / WORLD.size)
    expected = serial(WORLD.size, rescaled, 5, keep, delay)[WORLD.rank]
    assert far(model, expected) < 1e-12
    trainer.close()


@pytest.mark.mpi(min_size=2)
def test_compressed_differences_train_nearly_as_well() -> None:
    losses = []
    for compression in (None, {"type": "fp16"}, {"type": "int"}, {"type": "int", "bits": 4}):
        done = local({}, steps=30, every=5, outer="average", compression=compression)
        assert done is not None
        trainer, model = done
        trainer.share()
        losses.append(loss_of(model, joined_batch(31)).item())
        trainer.close()
    assert all(abs(loss / losses[0] - 1) < bound for loss, bound in zip(losses[1:], [1e-3, 1e-2, 0.1])), losses


@pytest.mark.parametrize("options", [{}, {"servers": 1}], ids=str)
@pytest.mark.mpi(min_size=2)
def test_changes_count_by_their_tokens(options: dict[str, Any]) -> None:
    """One plain step apart is a step by the gradient's mean over all tokens."""
    model, workers = network(), workers_of(options)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    try:
        trainer = mpips.torch.LocalSGD(model, inner, "average", 1, by_tokens=True, **options)
    except SystemExit:
        return
    rank = trainer.store.rank
    trainer.zero_grad()
    loss_of(model, batch(1, rank=rank)).backward()
    said = heard(trainer.step)
    trainer.step(tokens=10 * rank)
    trainer.close()
    plain = network()
    total = sum(10 * other for other in range(workers))
    for other in range(workers):
        (loss_of(plain, batch(1, rank=other)) * (10 * other / total if total else 1)).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    assert far(model, plain) < 1e-12
    assert "tokens=None: give the step's tokens, an int" in said


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"every": 0}, "every=0: give an int, at least 1"),
        ({"every": 4, "fragments": 5}, "fragments=5 of every=4 steps"),
        ({"every": 4, "fragments": 2, "delay": 2}, "delay=2: the next fragment is due after 2 steps"),
        ({"keep": 1.0}, "keep=1.0: give a share"),
        ({"outer": "adam"}, "outer='adam' is unknown: give nesterov, average"),
        ({"outer": None}, "TypeError: outer is a NoneType, no optimizer of gradients: give nesterov, average"),
        ({"compression": "fp16"}, 'compression is given as {"type": "fp16"}, not as'),
        ({"every": 99, "fragments": 9}, "fragments=9: there are 6 arrays of parameters"),
    ],
)
def test_wrong_arguments_are_refused(more: dict[str, Any], sentence: str) -> None:
    assert sentence in heard(lambda: local({}, **more))


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model: Any = network()
    said = heard(lambda: mpips.torch.LocalSGD(model.parameters(), torch.optim.SGD(model.parameters(), 0.1)))
    assert "LocalSGD: model is a generator: pass a torch.nn.Module" in said
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    for word, inner in {"str": "adamw", "StepLR": schedule}.items():
        said = heard(lambda inner=inner: mpips.torch.LocalSGD(model, inner))  # type: ignore[misc]
        assert f"TypeError: LocalSGD: inner is a {word}: pass an optimizer of torch.optim, or one with step" in said


def test_a_state_that_is_none_is_refused() -> None:
    done = local({}, steps=0)
    assert done is not None
    assert "there is no 'inner', 'steps', 'since'" in heard(lambda: done[0].load_state_dict({}))
    done[0].close()


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ_are_named() -> None:
    said = heard(lambda: local({}, every=4 + (WORLD.rank == 0)))
    assert "every" in said and "4" in said and "5" in said, said


@pytest.mark.parametrize(
    "options", [{}, {"servers": 1, "by_tokens": True}, {"servers": 1, "kind": "dist_async"}], ids=str
)
@pytest.mark.mpi(min_size=2)
def test_a_grad_scaler_takes_it(options: dict[str, Any]) -> None:
    """One worker's gradients overflow: it makes no inner step then, and all exchange at the same step."""
    model, steps = network(), []
    inner = torch.optim.SGD(model.parameters(), 0.1)
    inner.register_step_post_hook(lambda *_: steps.append(1))
    try:
        trainer = mpips.torch.LocalSGD(model, inner, "average", every=3, **options)
    except SystemExit:
        return
    rank, by_tokens = trainer.store.rank, options.get("by_tokens")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        trainer.zero_grad()
        loss = loss_of(model, batch(step, rank=rank))
        scaler.scale(loss * (float("inf") if rank == step == 0 else 1)).backward()
        if step % 2:
            scaler.unscale_(trainer)  # type: ignore[arg-type]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            assert norm < 1024, "gradients are unscaled"
        scaler.step(trainer, **({"tokens": 4} if by_tokens else {}))  # type: ignore[arg-type]
        scaler.update()
    assert (trainer.steps, len(steps)) == (6, 5 if rank == 0 else 6)
    assert scaler.get_scale() == (512 if rank == 0 else 1024)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    told = trainer.store.worker.agree("test", data=repr(far(model, network())).encode())
    trainer.close()
    assert options.get("kind") or len(set(told)) == 1, "all have the centre"
