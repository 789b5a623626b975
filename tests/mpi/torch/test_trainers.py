"""Trainers that others wrote, on two ranks: as one process that takes all ranks' batches."""

from __future__ import annotations

import json
import sys
from io import BytesIO

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import child
from tests.mpi.collectives.fault_table import ROOT
from tests.mpi.sizes import only_on
from tests.mpi.torch.wrapped import BATCH, NEEDS, STEPS, Data, network

RANKS, LIMIT = 2, 120


@only_on(1)
@pytest.mark.parametrize("wrap", NEEDS)
def test_a_trainer_trains_as_one_process(wrap: str) -> None:
    for name in NEEDS[wrap]:
        pytest.importorskip(name)
    said = BytesIO()
    start = [sys.executable, "-m", "launch.cli", "run", "-w", str(RANKS), "-m", "tests.mpi.torch.wrapped"]
    code = child.run([*start, wrap, "mpips"], LIMIT, ROOT, said)
    text = said.getvalue().decode(errors="replace")
    assert code == 0, text[-3000:]
    ranks = [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
    model, samples = network(), [Data(RANKS * STEPS)[number] for number in range(RANKS * STEPS * BATCH)]
    x, y = (torch.stack(each) for each in zip(*samples))
    optimizer, right = torch.optim.SGD(model.parameters(), 0.1), 0
    for inputs, targets in zip(x.split(RANKS * BATCH), y.split(RANKS * BATCH)):
        optimizer.zero_grad()
        out = model(inputs)
        cross_entropy(out, targets).backward()
        optimizer.step()
        right += int((out.argmax(1) == targets).sum())
    expected = {"accuracy": right / len(y), "loss": float(cross_entropy(model(x), y))}
    assert [line["rank"] for line in sorted(ranks, key=lambda line: line["rank"])] == list(range(RANKS))
    for line in ranks:
        assert (line["steps"], line["backend"]) == (STEPS, "mpips") and line["metrics"]
        for mine, other in zip(line["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), other.detach())
        assert line["metrics"] == pytest.approx({name: expected[name] for name in line["metrics"]}, abs=1e-5)
