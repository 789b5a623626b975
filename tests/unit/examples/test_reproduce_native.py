"""The MPI's own allreduce without a lab: Rabenseifner's algorithm as MPIs fold it, and a schedule for every variant."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.schedule import catalog
from collectives.schedule.proof import check
from collectives.simulator.flows import play_flows
from collectives.simulator.simulate import simulate
from collectives.simulator.topology import star
from examples.reproduce import native, rabenseifner
from launch import Launcher

FOLDS = pytest.mark.parametrize("fold", rabenseifner.FOLDS)


@FOLDS
@pytest.mark.parametrize("p", range(1, 18))
def test_rabenseifners_sums_over_any_number_of_ranks(fold: str, p: int) -> None:
    check(rabenseifner.build(p, fold))


@FOLDS
def test_without_a_fold_it_is_halving_and_doubling(fold: str) -> None:
    network = star(8, 1.0)
    ours = catalog.build("allreduce", "halving_doubling", 8)
    theirs = rabenseifner.build(8, fold)
    assert play_flows(theirs, network, 8.0) == play_flows(ours, network, 8.0) == pytest.approx(14.0)


def test_folds_send_halves_both_ways_or_all_one_way() -> None:
    """In vectors, 5 ranks: what the fold sends, 2 x 3/4 for halving and doubling, and the result for who stood by."""
    network, sent = star(5, 1.0), {}
    for fold in rabenseifner.FOLDS:
        run = simulate(rabenseifner.build(5, fold), network, 1600)
        sent[fold] = [n / 1600 for link, n in zip(network.links, run.link_bytes) if link.source.startswith("h")]
    np.testing.assert_allclose(sent["halves"], [0.5 + 1.5 + 1, 0.5 + 0.5, 1.5, 1.5, 1.5])
    np.testing.assert_allclose(sent["whole"], [1, 1.5 + 1, 1.5, 1.5, 1.5])


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_every_variant_has_a_schedule(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: Launcher("mpirun", flavour, "5"))
    variants = native.variants()
    assert variants[0].name == native.DEFAULT
    assert not variants[0].variables
    for variant in variants:
        for like in (variant.blocking, variant.immediate):
            check(native.schedule(like, 9))


@FOLDS
def test_messages_of_ranks_that_are_ahead_share_the_links_of_those_that_fold(fold: str) -> None:
    """Alone, a fold of nine would take 2 vectors' times, and the rest 1.75; measured in the lab it is 4.6 in all."""
    assert play_flows(rabenseifner.build(9, fold), star(9, 1.0), 1.0) == pytest.approx(4.62, rel=0.01)
