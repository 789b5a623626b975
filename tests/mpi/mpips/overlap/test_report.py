"""A Trainer's report and profile, on the job's own ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mpips.mlp import MLP
from mpips.overlap import load_profile, profile_to_dict
from mpips.overlap.__main__ import command as plan
from mpips.training import Elastic, Trainer
from tests.mpi.mpips.overlap.support import WORLD, all_ranks, worker
from tests.mpi.sizes import either_mpi, only_on

pytestmark = only_on(1, 2, 3, 4)
SIZES = (12, 30, 9, 5)
STORES = [("mpi_sync", {}), ("dist_sync", {"servers": 1}), ("mpi_async", {"servers": 1})]


class Nameless:
    """A model in layers whose arrays have no names."""

    def __init__(self, mlp: MLP) -> None:
        self._mlp = mlp

    def __getattr__(self, name: str) -> Any:
        if name == "names":
            raise AttributeError(name)
        return getattr(self._mlp, name)


def trainer_of(kind: str, options: dict[str, Any], named: bool = True, **words: Any) -> Trainer | None:
    """Return the trainer; None on a server, whose work is done by then."""
    kv = worker(kind, options)
    if kv is None:
        return None
    mlp = MLP(SIZES, loss="softmax", dtype="float64", seed=3)
    return Trainer(mlp if named else Nameless(mlp), kv, "sgd", learning_rate=0.1, **words)


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, WORLD.rank])
    return rng.normal(size=(8, SIZES[0])), rng.integers(SIZES[-1], size=8)


@either_mpi
@pytest.mark.parametrize("overlap", [None, "layerwise", "auto"])
@pytest.mark.parametrize("kind, options", STORES)
def test_every_trainer_reports_what_was_hidden(
    kind: str, options: dict[str, Any], overlap: str | None, tmp_path: Path
) -> None:
    trainer, ok = trainer_of(kind, options, overlap=overlap), True
    if trainer is not None:
        for seed in range(4):
            trainer.exchange.step(*batch(seed))
        trainer.exchange.finish()
        report = trainer.report()
        covered = [layer for first, last in report.push for layer in range(first, last + 1)]
        ok = report.strategy == (overlap or "none") and 0 <= report.hidden <= 1 and report.measured_s > 0
        ok &= covered == list(range(1, (len(SIZES) if overlap else 2 * len(SIZES) - 1)))
        ok &= (report.predicted_s is not None) == (overlap == "auto")
        ok &= report.iterations == 4 and (overlap is not None or report.hidden == 0)
        report.save_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        ok &= {event["cat"] for event in events if event["ph"] == "X"} >= {"push"}
        trainer.kv.close()
    assert all_ranks(ok)


@either_mpi
@pytest.mark.parametrize("overlap", [None, "single"])
@pytest.mark.parametrize("kind, options", STORES[:2])
def test_a_profile_of_the_job_is_one_that_plan_reads(
    kind: str, options: dict[str, Any], overlap: str | None, tmp_path: Path
) -> None:
    """Measured between two steps, it changes no number of the training."""
    parameters, ok = [], True
    for measured in (False, True):
        trainer = trainer_of(kind, options, overlap=overlap)
        if trainer is None:
            continue
        trainer.step(*batch(0))
        if measured:
            found = trainer.profile(*batch(9), save=tmp_path / "job.json")
            ok &= found.network.at(None)[0] >= 0 and all(layer.backward_s > 0 for layer in found.layers)
            ok &= profile_to_dict(found)["network"].get("collective") == ("servers" if options else None)
            ok &= [layer.parameters for layer in found.layers] == MLP(SIZES).layer_elements
            ok &= (tmp_path / "job.json").exists() == (trainer.kv.rank == 0)
            if trainer.kv.rank == 0:
                ok &= load_profile(tmp_path / "job.json") == found
                result = CliRunner().invoke(plan, [str(tmp_path / "job.json"), "--direction", "both"])
                ok &= result.exit_code == 0 and "joint" in result.output
                other = CliRunner().invoke(plan, [str(tmp_path / "job.json"), "--nodes", "64"])
                ok &= other.exit_code == 2 and "plan without --nodes" in other.output  # no ring measured it
        trainer.step(*batch(1))
        ok &= (trainer.report().predicted_s is not None) == (measured and overlap is not None)
        parameters.append(trainer.model.parameters)
        trainer.kv.close()
    ok &= all(np.array_equal(a, b) for a, b in zip(*parameters)) if parameters else True
    assert all_ranks(ok)


@pytest.mark.parametrize("kind, options", STORES[:2])
def test_a_model_without_names_has_a_profile(kind: str, options: dict[str, Any]) -> None:
    trainer, ok = trainer_of(kind, options, named=False), True
    if trainer is not None:
        trainer.step(*batch(0))
        ok = len(trainer.profile(*batch(1)).layers) == len(SIZES) - 1
        trainer.kv.close()
    assert all_ranks(ok)


def test_elastic_averaging_has_a_report_and_nothing_to_plan() -> None:
    trainer, ok = trainer_of("mpi_async", {"servers": 1}, elastic=Elastic()), True
    if trainer is not None:
        trainer.step(*batch(0))
        ok = trainer.report().hidden == 0
        with pytest.raises(ValueError, match="nothing to plan"):
            trainer.profile(*batch(0))
        trainer.kv.close()
    assert all_ranks(ok)
