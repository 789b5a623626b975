"""Any of the modes without writing its loop: the store decides which, `mpips.Trainer` does the rest.

mpips run --servers 1 --clients 2 --workers 4 examples/with_trainer.py --kind mpi_async --elastic 1
"""


import mpips
from mpips.mlp import MLP
from mpips.trainer import Elastic, Epoch
from task import digits
from words import Parser, number


def main(kind: str, elastic: bool, epochs: int) -> float:
    """The test accuracy after training."""
    kv = mpips.create(kind)
    x, y, *test = digits("float32")
    model = MLP((64, 256, 10), loss="softmax", empty=mpips.empty)
    way = Elastic(alpha=0.5) if elastic else None
    trainer = mpips.Trainer(model, kv, "sgd", learning_rate=0.05, elastic=way)

    def report(epoch: Epoch) -> None:
        if kv.rank == 0:
            print(f"epoch {epoch.epoch:3}  loss {epoch.loss:.4f}  test accuracy {epoch.accuracy:.3f}", flush=True)

    history = trainer.fit(x, y, batch_size=16, epochs=epochs, test=(test[0], test[1]), on_epoch=report)
    kv.close()
    return history[-1].accuracy or 0.0


if __name__ == "__main__":
    parser = Parser(description="Train on handwritten digits through mpips.Trainer.")
    parser.add_argument("--kind", default="mpi_sync")
    parser.add_argument("--elastic", type=int, default=0)
    parser.add_argument("--epochs", type=number(int, 1), default=20)
    main(**vars(parser.parse_args()))
