"""Data-parallel training: `DataParallel(model)` averages gradients over all ranks while backward goes on.

    model = mpips.torch.DataParallel(model)
    loss = loss_of(model(x)); loss.backward(); optimizer.step()      # gradients are those of all ranks' batches
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

import collectives
from collectives.communicator import communicator
from mpips.torch import agreement
from mpips.torch import buckets as cutting
from mpips.torch.buckets import Bucket, Costs
from mpips.torch.lockstep import Lockstep, see_alike
from mpips.torch.process_group.tensors import see_host, tensors_in
from mpips.torch.process_group.uncompiled import uncompiled
from mpips.torch.profile import Profile, costs
from mpips.torch.reducer import Reducer, names
from mpips.torch.state import broadcast_tensors, broadcast_values

PROFILE_STEPS = 3
"""Steps whose times are taken; the first is not, as it warms up."""
REVIEW_STEPS = 200
"""How often backward's time is compared with the profile's."""
SEE_STEPS = 128
"""How often parameters are compared between ranks, beside the steps 1, 2, 4, 8, ..."""


@uncompiled("_before_forward", "_after_forward")
class DataParallel(torch.nn.Module):
    """A model whose gradients are the mean over all ranks of `comm` after every backward.

    module      a model on the host, the same on every rank; rank 0's parameters and buffers are taken by all.
    comm        an mpi4py communicator (None: COMM_WORLD).
    buckets     which gradients travel together: a strategy of `mpips.overlap` ("merged" is MG-WFBP's, "optimal" the
                optimum, "single", "layerwise"), from a profile of the first steps; or most MiB of a bucket. "auto":
                "optimal" where communication can go on beside compute (between nodes, or where each rank has two
                cores), else "single".
    algorithm   of the allreduces, as in `collectives.allreduce`: "bcube(n=2,k=2)", "hierarchical(local=4)", ...
    broadcast_buffers   take rank 0's buffers at every forward in training, as of BatchNorm.

    Making it is collective, blocking; so is every backward outside `no_sync`. Where models or arguments differ, all
    ranks raise MismatchError. RuntimeError where a launcher, such as torchrun, has started processes that MPI has not
    joined. Parameters without a gradient on some ranks count as zero there; those without any have none.

    All ranks must make the same steps. All raise MismatchError where one leaves a backward pass or an optimizer's step
    out, or where its optimizer has another learning rate.
    """

    def __init__(
        self, module: torch.nn.Module, comm: MPI.Intracomm | None = None, buckets: str | float = "auto",
        algorithm: str = "auto", broadcast_buffers: bool = True, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        _see_arguments(module, comm, others)
        cutting.see(buckets)
        agreement.see_joined()
        self.module = module
        self._comm = MPI.COMM_WORLD if comm is None else comm
        home = communicator(self._comm)
        self._beside = home.nodes > 1 or home.board.memory.roomy
        self._asked, self._algorithm = buckets, algorithm
        self._strategy = "" if not isinstance(buckets, str) else buckets
        if buckets == "auto":
            self._strategy = "optimal" if self._beside and self._comm.size > 1 else "single"
        elif self._strategy:
            cutting.cut([1], [0.0], Costs(0.0, 0.0), self._strategy)  # a word that is unknown is refused here
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("DataParallel: the model has no parameter with requires_grad: there is nothing to average")
        agreement.agree(agreement.described(module, buckets, algorithm), self._comm)
        broadcast_tensors(self._tensors(), 0, self._comm)
        self._buffers_too = broadcast_buffers and any(True for _ in module.buffers())
        self._syncs, self._joining, self._armed = True, False, False
        self._active = torch.zeros(1)
        self._step = 0
        self._hooked: set[Tensor] = set()
        self._see_parameters()

    def _see_parameters(self) -> None:
        """Lay out the gradients of all parameters that require one now. Collective, blocking."""
        every = list(self.module.parameters())
        order = [parameter for parameter in every if parameter.requires_grad][::-1]
        self._frozen = [parameter for parameter in every if not parameter.requires_grad]
        most = float("inf") if isinstance(self._asked, str) else float(self._asked) * (1 << 20)
        self._planned = self._strategy in ("", "single")
        self._reducer = self._lay(order, cutting.by_bytes(_sizes(order), most))
        self._profile = Profile(len(order), self._comm)
        self._lockstep = Lockstep(order)
        self._nodes = [(parameter, get_gradient_edge(parameter).node) for parameter in order]
        for parameter in order:
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._ready)

    # ---- what training calls

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's; before it, rank 0's buffers are taken."""
        self._before_forward()
        output = self.module(*inputs, **keywords)
        self._after_forward(output)
        return output

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
                self._reducer.contribute_nothing()
                self._ended()
            broadcast_tensors(self._tensors(), self._last(made), self._comm)
            self._lockstep.clear()
        finally:
            self._joining = False

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale all gradients so that their norm is at most so; the norm that they had. Alike on all ranks."""
        norm = self._reducer.gradients.norm()
        if norm > most:
            for parameter in self._reducer.gradients.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(most / norm)
        return norm

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """That of the module, which plain PyTorch loads."""
        return self.module.state_dict(*args, **keywords)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the module, on this rank. Values are copied: `assign` would part gradients from their parameters."""
        if assign:
            raise ValueError("load_state_dict: assign=True makes other parameters: load into the module before it is "
                             "wrapped")  # fmt: skip
        return self.module.load_state_dict(state_dict, strict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """TypeError: what goes on between ranks is neither copied nor saved."""
        raise TypeError("a DataParallel is tied to the ranks that made it: copy or save its `module`, or its "
                        "`state_dict()`")  # fmt: skip

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters that travel together, in the order in which they do."""
        return names(self._reducer, self.module.named_parameters())

    # ---- one forward

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            if self._armed and torch._C._current_graph_task_id() < 0:
                self._see_raised()
            if any(parameter.requires_grad for parameter in self._frozen):
                what = f"{agreement.WHAT}, as a parameter has been unfrozen"
                agreement.agree(agreement.described(self.module, self._asked, self._algorithm), self._comm, what)
                self._reducer.free()
                self._see_parameters()
        if self._buffers_too and self.training and self._syncs and not self._joining:
            self._take_buffers()

    def _after_forward(self, output: Any) -> None:
        """See when backward comes to the output: before it comes to any parameter, and outside of all checkpoints."""
        if not torch.is_grad_enabled() or not self._syncs or not self.training:
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not outputs:
            return
        used = self._lockstep.forward()

        def come(gradient: Tensor) -> None:
            used()
            if self._syncs and not self._armed and self._accumulates():
                self._arm()

        for tensor in outputs:
            tensor.register_hook(come)

    def _take_buffers(self) -> None:
        """Take rank 0's buffers, as new tensors: a forward pass before this one may still need those that are there."""
        buffers = list(self.module.buffers())
        values = broadcast_values(buffers, 0, self._comm)
        others = {id(buffer): value for buffer, value in zip(buffers, values) if value is not None}
        if others:
            for module in self.module.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = others.get(id(buffer), buffer)

    # ---- one backward

    def _accumulates(self) -> bool:
        """Whether this backward is for gradients of parameters: that of `torch.autograd.grad` is not."""
        engine = torch._C._will_engine_execute_node
        return any(parameter.requires_grad and engine(node) for parameter, node in self._nodes)

    def _arm(self) -> None:
        """Backward has begun."""
        self._armed = self._lockstep.within = True
        Variable._execution_engine.queue_callback(self._finish)
        if self._joining:
            self._count(1.0)
        self._profile.begin()

    def _ready(self, parameter: Tensor) -> None:
        """A gradient has been accumulated."""
        if not self._syncs:
            return
        if not self._armed:
            self._arm()
        self._profile.ready(self._reducer.arrive(parameter))

    def _finish(self) -> None:
        """Backward has ended."""
        self._armed = self._lockstep.within = False
        self._profile.end()
        what = f"{agreement.WHAT}, backward pass {self._step + 1}"
        scale = self._comm.size / float(self._active[0]) if self._joining else 1.0
        try:
            alike = self._reducer.finish(None if self._joining else self._lockstep.token(), scale)
        except collectives.StallError as error:
            raise collectives.StallError(f"{error}; rank {self._comm.rank} is in {what}") from None
        if not alike:
            agreement.agree(self._lockstep.items(), self._comm, what, "let all ranks make the same steps")
        self._lockstep.next()
        self._ended()
        if not self._joining and (self._step & (self._step - 1) == 0 or self._step % SEE_STEPS == 0):
            see_alike(self.module.named_parameters(), self._comm, what, self._hooked)

    def _see_raised(self) -> None:
        """The last backward has raised: it counts as none where all ranks' have, and nothing has been exchanged."""
        self._armed = self._lockstep.within = False
        if self._reducer.begun or self._joining:
            what = f"{agreement.WHAT}, backward pass {self._step + 1}"
            with communicator(self._comm).failing(what):
                raise collectives.CollectiveError(f"{what}: it has raised on rank {self._comm.rank}, when gradients "
                                                  "had been exchanged: end the program there")  # fmt: skip
        self._reducer.forget()
        self._lockstep.fail()

    def _ended(self) -> None:
        """One more step has been made, by all ranks."""
        self._step += 1
        if not self._strategy or self._strategy == "single":
            return
        first = not self._planned and self._step >= PROFILE_STEPS
        if first or (self._planned and self._step % REVIEW_STEPS == 0 and self._profile.moved()):
            self._plan()

    # ---- buckets

    def _lay(self, parameters: Sequence[Tensor], cuts: Sequence[Bucket]) -> Reducer:
        return Reducer(parameters, cuts, self._comm, self._algorithm, self._beside)

    def _plan(self) -> None:
        """Buckets from the times of the steps so far, the same on all ranks. Collective."""
        order, ready = self._profile.order()
        parameters = [self._reducer.gradients.parameters[index] for index in order]
        cuts = cutting.cut(_sizes(parameters), ready, costs(self._comm, self._algorithm), self._strategy)
        self._reducer.free()
        self._reducer = self._lay(parameters, cuts)
        self._planned = True

    # ---- all ranks alike

    def _tensors(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

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


def _sizes(parameters: Sequence[Tensor]) -> list[int]:
    return [parameter.numel() * parameter.element_size() for parameter in parameters]


def _see_arguments(module: Any, comm: Any, others: Mapping[str, Any]) -> None:
    """TypeError or ValueError for what is no model on the host, no communicator, or no argument."""
    for name in others:
        why = ": mpips works on CPU tensors, leave it out" if "device" in name else ": leave it out"
        raise TypeError(f"DataParallel has no argument {name}{why}")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DataParallel: module is of type {type(module).__name__}: pass a torch.nn.Module")
    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"DataParallel: comm is of type {type(comm).__name__}: pass an mpi4py communicator, or None")
    see_host([*module.parameters(), *module.buffers()], "DataParallel")
