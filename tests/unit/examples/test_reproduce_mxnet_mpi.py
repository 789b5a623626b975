"""The MXNET-MPI reproduction without a lab: what the links allow each way."""

from __future__ import annotations

from examples.reproduce import mxnet_mpi


def test_clients_need_less_of_the_servers_links_and_all_masters_least() -> None:
    found = [mxnet_mpi.predicted(way, 12.5e6) for way in mxnet_mpi.WAYS]
    seconds = [one["predicted"] for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one["predicted"] >= 0.999 * one["bound"] for one in found)


def test_every_mode_of_the_paper_has_its_example() -> None:
    assert [mode.name for mode in mxnet_mpi.MODES] == [
        f"{group}-{kind}" for group in ("dist", "mpi") for kind in ("SGD", "ASGD", "ESGD")
    ]
    assert all((mxnet_mpi.lab.ROOT / mode.script).is_file() for mode in mxnet_mpi.MODES)
