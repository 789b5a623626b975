"""Train in any mode without writing a loop: `mpips.Trainer` has the loop, and the kind of store decides the mode.

mpips run --servers 1 --clients 2 --workers 4 examples/with_trainer.py --kind mpi_async --elastic 1
mpips run --servers 1 --workers 4 examples/with_trainer.py --kind dist_sync --checkpoints out/digits

With --checkpoints, a job that was killed continues from its last checkpoint when it is started again.
"""

import mpips
from arguments import Parser, number_parser
from mpips.mlp import MLP
from mpips.optimizers import Cosine
from mpips.training import Callback, Checkpoint, EarlyStop, Elastic, Epoch
from task import digits

BATCH_SIZE = 16


def main(kind: str, elastic: bool, epochs: int, checkpoints: str = "") -> float:
    """Train, and return the test accuracy."""
    kv = mpips.create(kind)
    x, y, *test = digits("float32")
    model = MLP((64, 256, 10), loss="softmax", empty=mpips.empty)
    # The learning rate falls along half a cosine over all steps.
    steps = epochs * (len(x) // (BATCH_SIZE * kv.num_workers))
    trainer = mpips.Trainer(
        model,
        kv,
        "sgd",
        learning_rate=Cosine(0.05, steps),
        momentum=0.9,
        elastic=Elastic(alpha=0.5) if elastic else None,
        metrics={"accuracy": lambda outputs, y: outputs.argmax(axis=1) == y},
    )

    def report(epoch: Epoch) -> None:
        if kv.rank == 0:
            accuracy = 100 * (epoch.accuracy or 0.0)
            print(f"epoch {epoch.epoch:3}  loss {epoch.loss:.4f}  test accuracy {accuracy:.2f} %", flush=True)

    callbacks: list[Callback] = [EarlyStop("test_accuracy", patience=5)]
    if checkpoints:
        callbacks.append(Checkpoint(checkpoints, every=50))
    history = trainer.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        test=(test[0], test[1]),
        callbacks=callbacks,
        on_epoch=report,
        resume=checkpoints or None,
    )
    kv.close()
    return history[-1].accuracy or 0.0


if __name__ == "__main__":
    parser = Parser(description="Train on handwritten digits through mpips.Trainer.")
    parser.add_argument("--kind", default="mpi_sync")
    parser.add_argument("--elastic", type=int, default=0)
    parser.add_argument("--epochs", type=number_parser(int, 1), default=20)
    parser.add_argument("--checkpoints", default="", help="save to this folder, and go on from it")
    main(**vars(parser.parse_args()))
