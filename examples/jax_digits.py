"""A small network for handwritten digits in JAX and optax, data parallel. The allreduce of gradients is inside `jit`.

mpips run -w 4 examples/jax_digits.py --epochs 5
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpips.jax
from task import digits

Weights = dict[str, Any]


def make_weights(hidden: int = 128) -> Weights:
    """Return initial weights for two dense layers."""
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(first, (64, hidden)) / 8,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) / hidden**0.5,
        "b2": jnp.zeros(10),
    }


def logits(weights: Weights, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]


def loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, x), y).mean()


def main(epochs: int, batch_size: int, learning_rate: float) -> None:
    rank, ranks = mpips.rank(), mpips.size()
    x, y, test_x, test_y = digits("float32")
    optimizer = optax.adam(learning_rate)
    weights = make_weights()
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Weights, state: Any, x: jax.Array, y: jax.Array) -> tuple[Weights, Any]:
        # allreduce returns the mean over all ranks.
        gradients = mpips.jax.allreduce(jax.grad(loss)(weights, x, y))
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state

    random, start = np.random.default_rng(0), time.perf_counter()
    steps = len(x) // (ranks * batch_size)
    for epoch in range(1, epochs + 1):
        # All ranks have the same order, so that no two ranks train on the same image.
        order = random.permutation(len(x))
        for batch in order[: steps * ranks * batch_size].reshape(steps, ranks, batch_size)[:, rank]:
            weights, state = step(weights, state, x[batch], y[batch].astype(np.int32))
        if rank == 0:
            right = float((logits(weights, test_x).argmax(1) == test_y).mean())
            seconds = time.perf_counter() - start
            print(f"epoch {epoch}: {right:.1%} of the test images right, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits with JAX.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    options = parser.parse_args()
    main(options.epochs, options.batch_size, options.learning_rate)
