"""Row optimizers against PyTorch, against formulas of papers, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpips.optimizers import Cosine
from mpips.tables.row_optimizers import changed, clipped, create, encode
from mpips.tables.rows import TableRows
from tests.unit.mpips.tables.cards import card_of

STEPS = 40


def pushes() -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each step some of nine ids, some of them seldom, and a gradient for each."""
    random = np.random.default_rng(2)
    named = [np.flatnonzero(random.random(9) < np.arange(1, 10) / 9) for _ in range(STEPS)]
    return [(ids, random.standard_normal((len(ids), 1))) for ids in named]


@pytest.mark.parametrize(
    "optimizer, numbers, kind, options",
    [
        ("adam", {"weight_decay": 0.1}, "AdamW", {"weight_decay": 0.1}),
        ("row_adam", {}, "Adam", {}),
        ("row_adam", {"weight_decay": 0.1, "beta1": 0.8}, "AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.999)}),
        ("sgd", {"weight_decay": 0.1}, "SGD", {"weight_decay": 0.1}),
    ],
)
def test_rows_of_one_value_are_trained_as_pytorch_trains_them(
    optimizer: str, numbers: dict[str, Any], kind: str, options: dict[str, Any]
) -> None:
    """Each row is a parameter of an optimizer of its own, which makes a step when an update names the row."""
    torch = pytest.importorskip("torch")
    table = TableRows(card_of(1, "float64", optimizer, rate=0.05, numbers=numbers))
    weights = [torch.nn.Parameter(torch.from_numpy(row)) for row in table.pull(np.arange(9))]
    each = [getattr(torch.optim, kind)([weight], lr=0.05, **options) for weight in weights]
    for step, (ids, gradients) in enumerate(pushes(), 1):
        table.update(ids, gradients, step)
        for one, gradient in zip(ids.tolist(), gradients):
            weights[one].grad = torch.from_numpy(gradient)
            each[one].step()
    expected = torch.stack(weights).detach().numpy()
    assert np.allclose(table.pull(np.arange(9)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("l1, l2, beta", [(0.0, 0.0, 1.0), (0.7, 0.0, 0.0), (0.3, 0.2, 2.0)])
def test_ftrl_is_that_of_the_paper(l1: float, l2: float, beta: float) -> None:
    """McMahan et al. 2013, Algorithm 1: of each coordinate z and n, and w from them when it is needed."""
    numbers, alpha = {"l1": l1, "l2": l2, "beta": beta}, 0.2
    table = TableRows(card_of(3, "float64", "ftrl", bound=0.0, rate=alpha, numbers=numbers))
    z, n = np.zeros((9, 3)), np.zeros((9, 3))

    def weight(at: tuple[int, int]) -> float:
        if abs(z[at]) <= l1:
            return 0.0
        return float(-1 / ((beta + np.sqrt(n[at])) / alpha + l2) * (z[at] - np.sign(z[at]) * l1))

    for step, (ids, gradients) in enumerate(pushes(), 1):
        wide = gradients * [1.0, -0.3, 0.01]
        table.update(ids, wide, step)
        for i, gradient in zip(ids.tolist(), wide):
            for j, g in enumerate(gradient):
                w = weight((i, j))
                sigma = (np.sqrt(n[i, j] + g**2) - np.sqrt(n[i, j])) / alpha
                z[i, j] += g - sigma * w
                n[i, j] += g**2
    expected = np.array([[weight((i, j)) for j in range(3)] for i in range(9)])
    rows = table.pull(np.arange(9))
    assert np.allclose(rows, expected, rtol=1e-12, atol=1e-15)
    assert ((rows == 0) == (expected == 0)).all() and (not l1 or (rows == 0).any()) and rows.any()


def test_row_adam_is_that_of_fbgemm() -> None:
    """`partial_rowwise_adam`: the first moment whole, the second the mean of squares over the row."""
    table = TableRows(card_of(4, "float64", "row_adam", rate=0.1))
    w, m, v = table.pull(np.array([5]))[0], np.zeros(4), 0.0
    for step, g in enumerate(np.random.default_rng(3).standard_normal((STEPS, 4)), 1):
        table.update(np.array([5]), g[None], step)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * float((g * g).mean())
        w = w - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    assert np.allclose(table.pull(np.array([5]))[0], w, rtol=1e-12, atol=1e-12)


def test_only_pushed_rows_decay() -> None:
    table, both = TableRows(card_of(2, "float64", "adagrad", rate=0.5, numbers={"weight_decay": 0.2})), np.arange(2)
    table.update(both, np.ones((2, 2)), 1)
    before = table.pull(both)
    table.update(both[:1], np.zeros((1, 2)), 2)  # a gradient of zeros only decays
    assert np.allclose(table.pull(both[:1]), before[:1] * 0.9)
    assert table.pull(both[1:]).tobytes() == before[1:].tobytes()


@pytest.mark.parametrize("dim", [1, 7, 200])
def test_a_gradient_is_clipped_by_its_norm(dim: int) -> None:
    random = np.random.default_rng(4)
    gradients = (
        random.standard_normal((20, dim)).astype(np.float32) * np.logspace(-3, 30, 20, dtype=np.float32)[:, None]
    )
    norms = np.linalg.norm(gradients.astype(float), axis=1)
    found = clipped(gradients, 2.0)
    assert found[norms <= 2].tobytes() == gradients[norms <= 2].tobytes()
    assert np.allclose(np.linalg.norm(found[norms > 2].astype(float), axis=1), 2, rtol=1e-5)
    assert np.allclose(found / norms[:, None], gradients * (np.minimum(norms, 2) / norms**2)[:, None], rtol=1e-5)


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("ftrl", {"weight_decay": 0.1}, "it takes those of optimizer 'ftrl': learning_rate, beta, l1, l2, clipnorm"),
        ("ftrl", {"learning_rate": 0}, "gradients are divided by the rate: give a number above 0"),
        ("ftrl", {"learning_rate": Cosine(0.1, 9)}, "its state depends on the rate: give a number"),
        ("ftrl", {"l1": -1}, "give a number >= 0"),
        ("adam", {"weight_decay": -1}, "give a number >= 0"),
        ("sgd", {"clipnorm": -1}, "give a number >= 0"),
        ("sgd", {"clipnorm": None}, "give a finite number"),
    ],
)
def test_what_an_optimizer_cannot_have_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        create(name, options)


def test_only_numbers_of_the_optimizer_change() -> None:
    _, numbers = encode(create("sgd", {"learning_rate": 0.1}))
    with pytest.raises(TypeError, match=r"optimizer 'sgd' has no argument beta: it takes learning_rate, .*, clipnorm$"):
        changed("sgd", numbers, {"beta": 1, "learning_rate": 0.2})
    with pytest.raises(TypeError, match=r"no argument evict: it takes .*, clipnorm; evict of a table cannot change"):
        changed("sgd", numbers, {"evict": 1})


def test_the_rate_of_ftrl_cannot_change() -> None:
    _, numbers = encode(create("ftrl", {"learning_rate": 0.1}))
    with pytest.raises(
        ValueError, match="keeps its state in terms of learning_rate, which cannot change: leave it out"
    ):
        changed("ftrl", numbers, {"learning_rate": 0.2})
    assert changed("ftrl", numbers, {"learning_rate": 0.1, "l2": 0.5}) == encode(create("ftrl", {"l2": 0.5}))[1]
