"""A model of your own that exchanges gradients during its computation: Trainer(..., overlap="auto").

mpips run --servers 1 --workers 4 examples/overlap.py --trace trace.json --profile job.json
mpips plan job.json
"""

from itertools import pairwise

import numpy as np

import mpips
from arguments import Parser, number_parser
from mpips.overlap import Hook, lay_out
from task import digits

Array = np.ndarray


class Network:
    """Dense layers with a ReLU between them.

    Two things make overlap possible. The parameters and gradients are views of flat arrays. And the passes call
    `before` and `ready` at every layer.
    """

    def __init__(self, *sizes: int) -> None:
        shapes = [[(inputs, outputs), (outputs,)] for inputs, outputs in pairwise(sizes)]
        self.flat_parameters, self.layers, self.layer_elements = lay_out(shapes, empty=mpips.empty)
        self.flat_gradients, self.slopes, _ = lay_out(shapes, empty=mpips.empty)
        self.parameters = [self.flat_parameters]
        self.gradients = [self.flat_gradients]
        rng = np.random.default_rng(0)
        for weight, bias in self.layers:
            weight[:] = rng.normal(0, np.sqrt(2 / len(weight)), weight.shape)
            bias[:] = 0

    def forward(self, x: Array, before: Hook | None = None) -> tuple[list[Array], Array]:
        """Return the inputs of all layers, and the scores, which are the output of the last layer."""
        inputs = []
        for layer, (weight, bias) in enumerate(self.layers):
            # From here on, the parameters of this layer are used.
            if before:
                before(layer)
            inputs.append(x if not layer else np.maximum(x, 0))
            x = inputs[-1] @ weight + bias
        return inputs, x

    def loss_and_gradients(self, x: Array, y: Array, before: Hook | None = None, ready: Hook | None = None) -> float:
        inputs, scores = self.forward(x, before)
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(len(y)), y]).mean()
        chances[np.arange(len(y)), y] -= 1
        slope = chances / len(y)
        for layer in reversed(range(len(self.layers))):
            weight_slope, bias_slope = self.slopes[layer]
            np.matmul(inputs[layer].T, slope, out=weight_slope)
            slope.sum(axis=0, out=bias_slope)
            if layer:
                slope = slope @ self.layers[layer][0].T * (inputs[layer] > 0)
            # The gradients of this layer are complete, and its parameters are no longer used.
            if ready:
                ready(layer)
        return float(loss)

    def accuracy(self, x: Array, y: Array) -> float:
        return float((self.forward(x)[1].argmax(axis=1) == y).mean())


def main(kind: str, overlap: str, epochs: int, profile: str = "", trace: str = "") -> float:
    """Train, and return the test accuracy."""
    kv = mpips.create(kind)
    x, y, *test = digits("float32")
    trainer = mpips.Trainer(Network(64, 256, 64, 10), kv, "sgd", learning_rate=0.05, momentum=0.9, overlap=overlap)
    history = trainer.fit(x, y, batch_size=16, epochs=epochs, test=(test[0], test[1]))
    if profile:
        trainer.profile(x[:16], y[:16], save=profile)
    if kv.rank == 0:
        print(f"test accuracy {history[-1].accuracy:.3f} in {history[-1].seconds:.2f} s")
        print(trainer.report())
        if trace:
            trainer.report().save_trace(trace)
    kv.close()
    return history[-1].accuracy or 0.0


if __name__ == "__main__":
    parser = Parser(description="Train on handwritten digits, and exchange gradients during the computation.")
    parser.add_argument("--kind", default="dist_sync")
    parser.add_argument("--overlap", default="auto")
    parser.add_argument("--epochs", type=number_parser(int, 1), default=20)
    parser.add_argument("--profile", default="", help="write a profile of the job to this file, for mpips plan")
    parser.add_argument("--trace", default="", help="write the last iteration to this file, as a Chrome trace")
    options = parser.parse_args()
    parser.check_files(options, "profile", "trace")
    main(**vars(options))
