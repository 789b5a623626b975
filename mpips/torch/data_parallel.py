"""Data-parallel training: `DataParallel(model)` averages gradients over all ranks while backward goes on.

    model = mpips.torch.DataParallel(model)
    loss = loss_of(model(x)); loss.backward(); optimizer.step()      # gradients are those of all ranks' batches
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.autograd import Variable

import collectives
from collectives.communicator import communicator
from mpips.overlap.fit import costs as fitted
from mpips.torch import buckets as cutting
from mpips.torch.buckets import Bucket, Costs
from mpips.torch.gradients import Gradients, empty
from mpips.torch.group import communication
from mpips.torch.state import broadcast_tensors
from mpips.torch.works import Job

PROFILE_STEPS = 3
"""Steps whose times are taken; the first is not, as it warms up."""
REVIEW_STEPS, DRIFT = 200, 0.3
"""How often backward's time is compared with the profile's, and how far it may have moved."""
PROBE_BYTES, PROBES = (1 << 12, 1 << 18, 1 << 21), 5


class DataParallel(torch.nn.Module):
    """A model whose gradients are the mean over all ranks of `comm` after every backward.

    module      a model on the host, the same on every rank; rank 0's parameters and buffers are taken by all.
    comm        an mpi4py communicator (None: COMM_WORLD).
    buckets     which gradients travel together: a strategy of `mpips.overlap` ("merged" is MG-WFBP's, "optimal" the
                optimum, "single", "layerwise"), from a profile of the first steps; or most MiB of a bucket. "auto":
                "optimal" where communication can go on beside compute, else "single".
    algorithm   of the allreduces, as in `collectives.allreduce`: "bcube(n=2,k=2)", "hierarchical(local=4)", ...
    broadcast_buffers   take rank 0's buffers at every forward in training, as of BatchNorm.

    Making it is collective, blocking; so is every backward outside `no_sync`. MismatchError on all ranks where models
    differ. Parameters without a gradient on some ranks count as zero there; those without any have none.
    """

    def __init__(
        self, module: torch.nn.Module, comm: MPI.Intracomm | None = None, buckets: str | float = "auto",
        algorithm: str = "auto", broadcast_buffers: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module = module
        self._comm = MPI.COMM_WORLD if comm is None else comm
        self._home = communicator(self._comm)
        self._beside = self._home.nodes > 1 or not self._home.board.memory.crowded
        self._asked, self._algorithm = buckets, algorithm
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError("DataParallel: the model has no parameter with requires_grad: there is nothing to average")
        if isinstance(buckets, str) and buckets != "auto":
            cutting.cut([1], [0.0], Costs(0.0, 0.0), buckets)  # a word that is unknown is refused here
        self._see_alike(module)
        broadcast_tensors([*module.parameters(), *module.buffers()], 0, self._comm)
        self._buffers_too = broadcast_buffers and any(True for _ in module.buffers())
        self._syncs, self._joining, self._armed = True, False, False
        self._active = torch.zeros(1)
        self._step, self._began = 0, 0.0
        self._spans: list[float] = []
        self._usual = 0.0
        self._lay(parameters[::-1])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    # ---- what training calls

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's; before it, rank 0's buffers are taken."""
        if self._joining and self._syncs:
            self._count(1.0)
        elif self._buffers_too and self.training and self._syncs:
            broadcast_tensors(self.module.buffers(), 0, self._comm)
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within adds to this rank's gradients and exchanges nothing; the next one outside exchanges all."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Ranks may make different numbers of steps within: who is done contributes nothing and is not counted. At the
        end all have the parameters of those who made most."""
        self._joining, before = True, self._step
        try:
            yield
            made = self._step - before
            while self._count(0.0):
                self._gradients.nothing()
                self._run(0)
                self._ended()
            broadcast_tensors([*self.module.parameters(), *self.module.buffers()], self._last(made), self._comm)
        finally:
            self._joining = False

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale all gradients so that their norm is at most so; the norm that they had. Alike on all ranks."""
        norm = self._gradients.norm()
        if norm > most:
            for parameter in self._gradients.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(most / norm)
        return norm

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """That of the module, which plain PyTorch loads."""
        return self.module.state_dict(*args, **keywords)

    def load_state_dict(self, state: Any, *args: Any, **keywords: Any) -> Any:
        """Into the module, on this rank."""
        return self.module.load_state_dict(state, *args, **keywords)

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters that travel together, in the order in which they do."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [
            [names[parameter] for parameter in self._gradients.parameters[first:last]] for first, last in self._buckets
        ]

    # ---- one backward

    def _ready(self, parameter: Tensor) -> None:
        """A gradient has been accumulated."""
        if not self._syncs:
            return
        if not self._armed:
            self._armed, self._began = True, time.perf_counter()
            Variable._execution_engine.queue_callback(self._finish)
        index = self._place[parameter]
        self._gradients.take(index)
        self._times[index] = time.perf_counter() - self._began
        self._missing.discard(index)
        while self._next < len(self._buckets) and self._there(self._buckets[self._next]):
            self._start(self._next)

    def _there(self, bucket: Bucket) -> bool:
        if self._next == len(self._buckets) - 1 and len(self._buckets) == 1:
            return False  # at the end of backward, with all there is
        return self._missing.isdisjoint(range(*bucket)) and self._next < len(self._buckets) - 1

    def _start(self, number: int) -> None:
        plan = self._plans[number]
        self._next = number + 1
        job = Job(plan, lambda: plan.steps(), True)
        self._under_way.append(communication.do(job, self._beside))

    def _finish(self) -> None:
        """Backward has ended."""
        self._armed = False
        self._spans.append(time.perf_counter() - self._began)
        for index in self._missing:
            self._gradients.lack(index)
        self._run(self._next)
        scale = self._comm.size / float(self._active[0]) if self._joining else 1.0
        self._gradients.give(scale)
        self._ended()

    def _run(self, first: int) -> None:
        """Start the buckets from this one on, and wait for all."""
        for number in range(first, len(self._buckets)):
            self._start(number)
        for future in self._under_way:
            future.wait()
        self._under_way.clear()
        self._missing, self._next = set(range(len(self._place))), 0

    def _ended(self) -> None:
        """One more step has been made, by all ranks."""
        self._step += 1
        if not self._planned and self._step >= PROFILE_STEPS:
            self._plan()
        elif self._planned and isinstance(self._asked, str) and self._step % REVIEW_STEPS == 0:
            self._review()

    # ---- buckets

    def _lay(self, parameters: Sequence[Tensor], cuts: list[Bucket] | None = None) -> None:
        """Give gradients their places, in this order, and compile the allreduces. Collective."""
        for plan in getattr(self, "_plans", []):
            plan.free()
        kept = {parameter: parameter.grad for parameter in parameters}
        self._gradients = Gradients(parameters, self._comm)
        self._place = {parameter: index for index, parameter in enumerate(parameters)}
        nbytes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        if cuts is None:
            most = float(self._asked) * (1 << 20) if not isinstance(self._asked, str) else float("inf")
            cuts = cutting.by_bytes(nbytes, most)
        self._planned = not isinstance(self._asked, str) or self._strategy == "single"
        self._buckets = cutting.apart(cuts, [parameter.dtype for parameter in parameters])
        self._plans = [_Allreduce(self, bucket) for bucket in self._buckets]
        self._times = [0.0] * len(parameters)
        self._missing, self._next = set(range(len(parameters))), 0
        self._under_way: list[Any] = []
        for index, parameter in enumerate(parameters):
            if kept[parameter] is not None:
                self._gradients.views[index].copy_(kept[parameter])
                parameter.grad = self._gradients.views[index]

    @property
    def _strategy(self) -> str:
        if self._asked == "auto":
            return "optimal" if self._beside and self._comm.size > 1 else "single"
        return str(self._asked)

    def _plan(self) -> None:
        """Buckets from the times of the steps so far, the same on all ranks. Collective."""
        times = np.array(self._times)
        collectives.allreduce(times, self._comm, op="mean")
        order = sorted(range(len(times)), key=lambda index: (times[index], index))
        parameters = [self._gradients.parameters[index] for index in order]
        ready = list(accumulate((times[index] for index in order), max))
        nbytes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        self._usual = self._mean_span()
        self._lay(parameters, cutting.cut(nbytes, ready, self._costs(), self._strategy))
        self._planned = True

    def _review(self) -> None:
        """Take new times where backward takes longer, or shorter, than when the plan was made. Collective."""
        span = self._mean_span()
        if self._usual and abs(span - self._usual) > DRIFT * self._usual:
            self._plan()

    def _mean_span(self) -> float:
        """Backward's seconds, of the middle one of the last steps, over all ranks. Collective."""
        middle = np.array([float(np.median(self._spans[1:] or self._spans or [0.0]))])
        self._spans = []
        return float(collectives.allreduce(middle, self._comm, op="mean")[0])

    def _costs(self) -> Costs:
        """What an allreduce costs here, measured now. Collective."""
        seconds = np.zeros(len(PROBE_BYTES))
        for index, nbytes in enumerate(PROBE_BYTES):
            run = collectives.plan("allreduce", empty(nbytes // 4, torch.float32, self._comm).zero_().numpy(), self._comm,
                                   algorithm=self._algorithm)  # fmt: skip
            runs = []
            for _ in range(PROBES):
                begin = time.perf_counter()
                run()
                runs.append(time.perf_counter() - begin)
            seconds[index] = np.median(runs)
            run.free()
        collectives.allreduce(seconds, self._comm, op="mean")
        return Costs(*fitted(np.ones(len(seconds)), PROBE_BYTES, seconds))

    # ---- all ranks alike

    def _count(self, one: float) -> float:
        """How many ranks still have steps to make."""
        self._active[0] = one
        collectives.allreduce(self._active, self._comm)
        return float(self._active[0])

    def _last(self, steps: int) -> int:
        """The lowest rank that has made most steps."""
        made = np.zeros(self._comm.size)
        made[self._comm.rank] = steps
        return int(np.argmax(collectives.allreduce(made, self._comm)))

    def _see_alike(self, module: torch.nn.Module) -> None:
        shapes = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in module.named_parameters()]
        digest = hashlib.blake2b("\n".join(shapes).encode(), digest_size=4).hexdigest()
        elements = sum(parameter.numel() for parameter in module.parameters())
        self._home.agree(f"DataParallel of {type(module).__name__}, {len(shapes)} parameters with {elements} elements, "
                         f"names and shapes {digest}, buckets {self._asked}, algorithm {self._algorithm}")  # fmt: skip


class _Allreduce:
    """The mean of one bucket, run by the communication thread or at once."""

    def __init__(self, owner: DataParallel, bucket: Bucket) -> None:
        stretch = owner._gradients.stretch(*bucket)
        self._plan = collectives.plan("allreduce", stretch, owner._comm, op="mean", algorithm=owner._algorithm)

    def __call__(self) -> None:
        self._plan()

    def steps(self) -> Iterator[None]:
        self._plan.start()
        while not self._plan.test():
            yield
        self._plan.wait()

    def free(self) -> None:
        self._plan.free()
