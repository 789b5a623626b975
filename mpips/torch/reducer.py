"""Averages the gradients of a model, bucket by bucket, while backward goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI
from torch import Tensor

import collectives
from mpips.torch.buckets import Bucket, apart
from mpips.torch.gradients import Gradients
from mpips.torch.process_group.works import Job, Steps, communication, in_steps


class Reducer:
    """Gradients of `parameters`, in this order, and the allreduces of their buckets. Making it is collective.

    Buckets start in order, each when its last gradient has arrived; the last one, which carries which parameters were
    used, when backward has ended. `beside`: they go on beside backward.
    """

    def __init__(
        self, parameters: Sequence[Tensor], cuts: Sequence[Bucket], comm: MPI.Intracomm, algorithm: str, beside: bool
    ) -> None:
        kept = [parameter.grad for parameter in parameters]
        self.gradients = Gradients(parameters, comm)
        self.buckets = apart(cuts, [parameter.dtype for parameter in parameters])
        self._place = {parameter: index for index, parameter in enumerate(parameters)}
        self._bucket_of = [number for number, bucket in enumerate(self.buckets) for _ in range(*bucket)]
        self._plans = [
            collectives.plan("allreduce", self.gradients.stretch(*bucket), comm, op="mean", algorithm=algorithm)
            for bucket in self.buckets
        ]
        self._beside = beside
        self._under_way: list[Any] = []
        for parameter, view, gradient in zip(parameters, self.gradients.views, kept):
            if gradient is not None:
                view.copy_(gradient)
                parameter.grad = view
        self._again()

    def arrive(self, parameter: Tensor) -> int:
        """The parameter's gradient is there: buckets that are complete start. Its place in the order."""
        index = self._place[parameter]
        self.gradients.take(index)
        if index in self._missing:
            self._missing.discard(index)
            self._left[self._bucket_of[index]] -= 1
        while self._next < len(self.buckets) - 1 and not self._left[self._next]:
            self._start()
        return index

    def finish(self, scale: float = 1.0) -> None:
        """Backward has ended: reduce what is left, wait for all, and give parameters their gradients, times `scale`."""
        for index in self._missing:
            self.gradients.lack(index)
        self._reduce_rest()
        self.gradients.give(scale)

    def contribute_nothing(self) -> None:
        """Reduce zeros, as other ranks go on."""
        self.gradients.nothing()
        self._reduce_rest()

    def free(self) -> None:
        """Give back the plans. Collective."""
        for plan in self._plans:
            plan.free()

    def _start(self) -> None:
        plan = self._plans[self._next]
        self._next += 1
        self._under_way.append(communication.do(Job(plan, lambda: _steps(plan), True), self._beside))

    def _reduce_rest(self) -> None:
        try:
            while self._next < len(self.buckets):
                self._start()
            for future in self._under_way:
                future.wait()
        finally:
            self._again()

    def _again(self) -> None:
        """Nothing has arrived yet."""
        self._under_way.clear()
        self._missing, self._next = set(self._place.values()), 0
        self._left = [bucket.last - bucket.first for bucket in self.buckets]


def _steps(plan: Any) -> Steps:
    plan.start()
    yield from in_steps(plan)


def names(reducer: Reducer, named: Iterator[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of the parameters in each bucket."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in named}
    ordered = [known[parameter] for parameter in reducer.gradients.parameters]
    return [ordered[first:last] for first, last in reducer.buckets]
