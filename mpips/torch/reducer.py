"""Averages the gradients of a model, bucket by bucket, while backward goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI
from torch import Tensor

import collectives
from collectives.communicator import communicator
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
        self._beside, self._home = beside, communicator(comm)
        self._under_way: list[Any] = []
        for parameter, view, gradient in zip(parameters, self.gradients.views, kept):
            if gradient is not None:
                view.copy_(gradient)
                parameter.grad = view
        self._again()

    def arrive(self, parameter: Tensor) -> int:
        """Note that a gradient has been accumulated; return its place in the order.

        It is taken when the next one arrives: hooks of the user's that follow may still change it.
        """
        self._settle()
        self._pending = self._place[parameter]
        return self._pending

    def finish(self, token: int | None, scale: float = 1.0) -> bool:
        """Reduce what is left at the end of backward, wait for all, and give parameters their gradients, times `scale`.
        Return whether all ranks brought the same token; no gradient is given where they did not."""
        self._settle()
        for index in self._missing:
            self.gradients.lack(index)
        late = list(self._late)
        self._reduce_rest(token, late)
        return self.gradients.give(scale)

    def contribute_nothing(self) -> None:
        """Reduce zeros, as other ranks go on."""
        self.gradients.nothing()
        self._reduce_rest(None, ())

    @property
    def begun(self) -> bool:
        """Whether a bucket of this backward has started."""
        return self._next > 0

    def forget(self) -> None:
        """Begin anew after a backward that has raised before a bucket has started."""
        self._again()

    def free(self) -> None:
        """Give back the plans. Collective."""
        for plan in self._plans:
            plan.free()

    def _settle(self) -> None:
        """Take the gradient that has arrived last: buckets that are complete start."""
        index, self._pending = self._pending, -1
        if index < 0 or self.gradients.parameters[index].grad is None:  # a hook of the user's has dropped it
            return
        if self._bucket_of[index] < self._next:  # of a block that reentrant checkpointing runs more than once
            self._late.add(index)
            return
        self.gradients.take(index)
        if index in self._missing:
            self._missing.discard(index)
            self._left[self._bucket_of[index]] -= 1
        while self._next < len(self.buckets) - 1 and not self._left[self._next]:
            self.gradients.release(*self.buckets[self._next])
            self._start()

    def _start(self) -> None:
        plan = self._plans[self._next]
        self._next += 1
        self._under_way.append(self._begun(plan, self._beside))

    def _begun(self, plan: Any, beside: bool) -> Any:
        return communication.do(Job(plan, lambda: _steps(plan), self._home), beside)

    def _reduce_rest(self, token: int | None, late: Sequence[int]) -> None:
        try:
            self.gradients.say(token, bool(late))
            while self._next < len(self.buckets):
                self._start()
            for future in self._under_way:
                future.wait()
            if self.gradients.late():
                self._reduce_again(late)
        finally:
            self._again()

    def _reduce_again(self, late: Sequence[int]) -> None:
        """Add this rank's late gradients to the means: of what all ranks share the mean is the same again."""
        for index in late:
            self.gradients.add(index)
        for plan in self._plans[:-1]:
            self._begun(plan, False).wait()

    def _again(self) -> None:
        """Nothing has arrived yet."""
        self._under_way.clear()
        self._missing, self._next = set(self._place.values()), 0
        self._left = [bucket.last - bucket.first for bucket in self.buckets]
        self._late: set[int] = set()
        self._pending = -1


def _steps(plan: Any) -> Steps:
    plan.start()
    yield from in_steps(plan)


def names(reducer: Reducer, named: Iterator[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of the parameters in each bucket."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in named}
    ordered = [known[parameter] for parameter in reducer.gradients.parameters]
    return [ordered[first:last] for first, last in reducer.buckets]
