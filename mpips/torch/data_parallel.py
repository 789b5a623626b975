"""Data-parallel training: `DataParallel(model)` averages gradients over all ranks during the backward pass.

    model = mpips.torch.DataParallel(model)
    loss = loss_of(model(x))
    loss.backward()         # gradients are now the mean over all ranks' batches
    optimizer.step()

A backward pass calls `_begin_backward`, then `_note_gradient` for each parameter, and finally `_finish_backward`.
`_note_gradient` lets the `Reducer` start the allreduce of each bucket that is complete. After a few passes `_end_step`
plans the buckets again, based on the times at which gradients became ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

import mpips.collectives as collectives
from mpips.collectives import log
from mpips.collectives.communicator import communicator
from mpips.store.create import workers_of
from mpips.torch.backend import check_joined
from mpips.torch.buckets import BackwardProfile, Bucket, check_buckets, cut_by_bytes, cut_by_strategy, measure_allreduce
from mpips.torch.lockstep import Lockstep, agree, check_frozen, claim_gradients, is_due, model_items
from mpips.torch.reducer import Reducer
from mpips.torch.state import broadcast_tensors, broadcast_values
from mpips.torch.tensors import check_on_host, find_tensors, sparse_parameters, uncompiled

NAME = "DataParallel"
# Strategies that need no measured times: "" limits the bytes of a bucket, and "single" makes one bucket of everything.
UNPLANNED = ("", "single")
# Buckets are planned after this many backward passes, because the very first passes are slower than later ones.
PROFILE_STEPS = 3
# After each multiple of this many backward passes, their duration is compared with the duration at the last planning.
REVIEW_STEPS = 200

LOG = log.get("mpips.torch")


@uncompiled("_before_forward", "_after_forward", "_refuse_compiled_backward")
class DataParallel(torch.nn.Module):
    """Wraps a model so that each backward pass leaves the mean of all ranks' gradients in the parameters.

    Creating a DataParallel is collective and blocking, and so is every backward pass outside of `no_sync`. If a
    parameter gets a gradient on only some of the ranks, the other ranks contribute zeros to its mean. If it gets a
    gradient on no rank, its `grad` is None afterwards.

    Every rank must run the same steps. If one rank skips a backward pass or an optimizer step, or if its optimizer has
    a different learning rate, all ranks raise MismatchError.

    Args:
        module: A model on the host, the same on every rank. All ranks start with rank 0's parameters and buffers. The
            gradients of embeddings made with sparse=True are exchanged as rows, and stay sparse.
        comm: An mpi4py communicator. None means the workers of the open store if that store has servers, and otherwise
            COMM_WORLD.
        buckets: How gradients are grouped into allreduces. A number is the largest size of a bucket in MiB. The name of
            a strategy of `mpips.overlap` plans the buckets from the times of the first steps: "optimal", "merged" (the
            strategy of MG-WFBP), "layerwise" or "single". "auto" means "optimal" if ranks can communicate while they
            compute (between nodes, or on a node that has two cores for each rank), and otherwise "single".
        algorithm: The algorithm of the allreduces, as in `collectives.allreduce`. Examples are "bcube(n=2,k=2)" and
            "hierarchical(local=4)".
        broadcast_buffers: Copy rank 0's buffers, such as those of BatchNorm, to all ranks at every forward pass in
            training mode.

    Raises:
        MismatchError: Models or arguments differ between ranks. All ranks raise it.
        RuntimeError: A launcher such as torchrun has started processes that MPI has not joined.
        TypeError, ValueError: An argument is invalid, or the model has no parameter that requires a gradient.

    Example:
        >>> model = mpips.torch.DataParallel(torch.nn.Linear(3, 2))
        >>> model(torch.full((4, 3), 0.5)).sum().backward()  # each rank with a batch of its own
        >>> model.module.weight.grad[0]
        tensor([2., 2., 2.])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: MPI.Intracomm | None = None,
        buckets: str | float = "auto",
        algorithm: str = "auto",
        broadcast_buffers: bool = True,
        **others: object,
    ) -> None:
        super().__init__()
        _check_arguments(module, comm, others)
        check_buckets(buckets)
        check_joined()
        claim_gradients(self, NAME, module.named_parameters())
        self.module = module
        self._comm = workers_of(MPI.COMM_WORLD) if comm is None else comm
        home = communicator(self._comm)
        self._in_background = home.nodes > 1 or home.board.memory.roomy
        self._asked = buckets
        self._algorithm = algorithm
        self._strategy = buckets if isinstance(buckets, str) else ""
        if buckets == "auto":
            self._strategy = "optimal" if self._in_background and self._comm.size > 1 else "single"
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("DataParallel: the model has no parameter with requires_grad: there is nothing to average")
        agree(model_items(module, buckets, algorithm), self._comm, NAME)
        broadcast_tensors([*module.parameters(), *module.buffers()], 0, self._comm)
        self._sends_buffers = broadcast_buffers and any(True for _ in module.buffers())
        # Within no_sync() this is False: backward adds to this rank's own gradients and exchanges nothing. DDP has the
        # same attribute, and programs set it by hand.
        self.require_backward_grad_sync = True
        self._joining = False
        self._step = 0
        self._hooks: dict[Tensor, RemovableHandle] = {}
        # A tensor that is created in inference mode cannot be written by a backward pass.
        with torch.inference_mode(False):
            self._active = torch.zeros(1)
            self._lay_out()

    def _lay_out(self) -> None:
        """Allocate buckets for all parameters that require a gradient now. Collective, blocking."""
        every = list(self.module.parameters())
        # the reverse of the model's order is a first guess at the order in which gradients become ready
        order = [parameter for parameter in every if parameter.requires_grad][::-1]
        self._frozen = [parameter for parameter in every if not parameter.requires_grad]
        most = float("inf") if isinstance(self._asked, str) else float(self._asked) * (1 << 20)
        self._planned = self._strategy in UNPLANNED
        self._sparse = sparse_parameters(self.module)
        self._make_reducer(order, cut_by_bytes(self._sizes(order), most))
        self._profile = BackwardProfile(len(order), self._comm)
        self._lockstep = Lockstep(order)
        self._nodes = [(parameter, get_gradient_edge(parameter).node) for parameter in order]
        for parameter in order:
            # A parameter whose type has changed has lost its hook and needs a new one. Any other parameter must not get
            # a second hook.
            if parameter in self._hooks:
                self._hooks[parameter].remove()
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _make_reducer(self, order: Sequence[Tensor], cuts: Sequence[Bucket]) -> None:
        sparse = [index for index, parameter in enumerate(order) if parameter in self._sparse]
        self._reducer = Reducer(order, sparse, cuts, self._comm, self._algorithm, self._in_background)

    def _sizes(self, order: Sequence[Tensor]) -> list[int]:
        """Return the bytes that each gradient takes in the buckets. A sparse gradient takes none."""
        return [0 if p in self._sparse else p.numel() * p.element_size() for p in order]

    # ---- methods for training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module. In training mode, first copy rank 0's buffers (see `broadcast_buffers`)."""
        self._before_forward()
        output = self.module(*inputs, **keywords)
        self._after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for all but the last of several backward passes: accumulate gradients without exchanging them.

        Within the context, backward only adds to this rank's gradients. The first backward pass after the context
        exchanges the accumulated gradients.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """A context in which ranks may run different numbers of steps.

        A rank that has finished its loop contributes nothing to the other ranks' steps, and the mean is over the ranks
        that are still training. At the end every rank takes the parameters and buffers of a rank that made the most
        steps. Leaving the context is collective and blocking.
        """
        self._joining, before = True, self._step
        try:
            yield
            steps = np.zeros(self._comm.size)
            steps[self._comm.rank] = self._step - before
            while self._count_active(0.0):
                self._reducer.contribute_nothing()
                self._end_step()
            last = int(np.argmax(collectives.allreduce(steps, self._comm)))
            broadcast_tensors([*self.module.parameters(), *self.module.buffers()], last, self._comm)
            self._lockstep.clear()
        finally:
            self._joining = False

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale all gradients so that their total 2-norm is at most `most`. Local.

        The gradients are the mean over all ranks, so every rank gets the same norm without communication. Call it
        between backward and the optimizer's step.

        Args:
            most: The largest norm.

        Returns:
            The norm before scaling, a tensor of one element.
        """
        norm = self._reducer.gradients.norm()
        if norm > most:
            for parameter in self._reducer.gradients.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(most / norm)
        return norm

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        """Return the state of the wrapped module, without a prefix, so that plain PyTorch can load it. Local."""
        return self.module.state_dict(*args, **keywords)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state into the wrapped module. Local: every rank must load the same state.

        Values are copied into the parameters.

        Args:
            state_dict: A result of `state_dict`, or a state of the plain model.
            strict: As in `torch.nn.Module.load_state_dict`.
            assign: Must be False. True would replace the parameters, and new parameters have no place in the buckets.

        Returns:
            The missing and the unexpected names, as PyTorch returns them.

        Raises:
            ValueError: `assign` is True.
        """
        if assign:
            raise ValueError(
                "load_state_dict: assign=True makes other parameters: load into the module before it is wrapped"
            )
        return self.module.load_state_dict(state_dict, strict)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: a DataParallel can neither be copied nor pickled."""
        raise TypeError(
            "a DataParallel is tied to the ranks that made it: copy or save its `module`, or its `state_dict()`"
        )

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters of each bucket. Buckets are exchanged in this order."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        ordered = [names[parameter] for parameter in self._reducer.gradients.parameters]
        return [ordered[first:last] for first, last in self._reducer.buckets]

    # ---- one forward

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            self._lockstep.weights.note_forward()
            # No backward pass is running now, and the last one has not finished, so it must have raised.
            if self._lockstep.in_backward and torch._C._current_graph_task_id() < 0:
                self._end_raised()
            unfrozen = any(parameter.requires_grad for parameter in self._frozen)
            if unfrozen or not self._reducer.gradients.are_fitting():
                what = f"{NAME}, as a parameter {'has been unfrozen' if unfrozen else 'has got another type or order'}"
                agree(model_items(self.module, self._asked, self._algorithm), self._comm, what)
                self._reducer.free()
                self._lay_out()
        if self._sends_buffers and self.training and self.require_backward_grad_sync and not self._joining:
            self._take_buffers()

    def _after_forward(self, output: Any) -> None:
        """Add a hook to the output. It runs when the backward pass starts, before any gradient is ready.

        The hook of an output runs before the hook of any parameter. It does not run in the inner backward passes that
        checkpointing starts.
        """
        if not torch.is_grad_enabled() or not self.require_backward_grad_sync or not self.training:
            return
        outputs = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        if not outputs:
            return
        count_backward = self._lockstep.count_forward()

        def begin(gradient: Tensor) -> None:
            if torch.compiler.is_compiling():
                self._refuse_compiled_backward()
            count_backward()
            if self.require_backward_grad_sync and not self._lockstep.in_backward and self._accumulates():
                self._begin_backward()

        for tensor in outputs:
            tensor.register_hook(begin)

    def _refuse_compiled_backward(self) -> None:
        """Raise RuntimeError, because compiled autograd would not call `_finish_backward`."""
        raise RuntimeError(
            "DataParallel: backward runs in compiled autograd, which leaves out the exchange of "
            "gradients: set torch._dynamo.config.compiled_autograd = False, and call backward() outside "
            "of torch.compile"
        )

    def _take_buffers(self) -> None:
        """Replace this rank's buffers by rank 0's.

        The buffers become new tensors, because the backward pass of an earlier forward pass may still need the old
        values.
        """
        buffers = list(self.module.buffers())
        values = broadcast_values(buffers, 0, self._comm)
        others = {id(buffer): value for buffer, value in zip(buffers, values) if value is not None}
        if others:
            for module in self.module.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = others.get(id(buffer), buffer)

    # ---- one backward

    def _accumulates(self) -> bool:
        """True if this backward pass writes gradients into parameters. A pass of `torch.autograd.grad` does not."""
        engine = torch._C._will_engine_execute_node
        return any(parameter.requires_grad and engine(node) for parameter, node in self._nodes)

    def _begin_backward(self) -> None:
        self._lockstep.in_backward = True
        Variable._execution_engine.queue_callback(self._finish_backward)
        if self._joining:
            self._count_active(1.0)
        self._profile.begin()

    def _note_gradient(self, parameter: Tensor) -> None:
        """The hook that runs when a parameter's gradient has been accumulated."""
        if not self.require_backward_grad_sync:
            return
        # The output has no hook if the forward pass was in eval mode or the program called the inner module itself.
        if not self._lockstep.in_backward:
            self._begin_backward()
        place = self._reducer.note_arrival(parameter)
        if self._strategy not in UNPLANNED:
            self._profile.note_ready(place)

    def _finish_backward(self) -> None:
        """Reduce the remaining buckets, set the gradients, and check that all ranks made the same steps."""
        self._lockstep.in_backward = False
        self._profile.end()
        what = f"{NAME}, backward pass {self._step + 1}"
        scale = self._comm.size / float(self._active[0]) if self._joining else 1.0
        try:
            alike = self._reducer.finish(None if self._joining else self._lockstep.token(), scale)
        except collectives.StallError as error:
            raise collectives.StallError(f"{error}; rank {self._comm.rank} is in {what}") from None
        if not alike:
            agree(self._lockstep.items(), self._comm, what, "let all ranks make the same steps", unlike=True)
        if not self._joining:
            self._compare_parameters(self._step + 1, what)
        self._lockstep.begin_anew()
        self._end_step()

    def _compare_parameters(self, number: int, what: str) -> None:
        """After some of the backward passes, check that all ranks have equal parameters. Collective, blocking."""
        weights = self._lockstep.weights
        if is_due(number):
            check_frozen(self.module.named_parameters(), self._comm, what, self._hooks)
        if weights.due:
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            weights.compare(number, names, self._comm, what)
        weights.due |= is_due(number + 1)

    def _end_raised(self) -> None:
        """Clean up after a backward pass that raised.

        If no bucket was exchanged yet, training can continue, provided that the pass raised on every rank. Ranks check
        this in the next pass, because they compare how many passes have raised. If buckets were exchanged, other ranks
        are in a pass that cannot be finished, so all ranks raise.
        """
        self._lockstep.in_backward = False
        if self._reducer.has_begun or self._joining:
            what = f"{NAME}, backward pass {self._step + 1}"
            with communicator(self._comm).failing(what):
                raise collectives.CollectiveError(
                    f"{what}: it has raised on rank {self._comm.rank}, when gradients "
                    "had been exchanged: end the program there"
                )
        self._reducer.reset()
        self._lockstep.count_failure()

    def _end_step(self) -> None:
        """Count a backward pass, and plan the buckets if that is due. Collective, blocking.

        Planning is due after the first few passes, and again when the duration of backward passes has changed.
        """
        self._step += 1
        if self._strategy in UNPLANNED:
            return
        first = not self._planned and self._step >= PROFILE_STEPS
        if not first and not (self._planned and self._step % REVIEW_STEPS == 0 and self._profile.has_drifted()):
            return
        order, ready = self._profile.average()
        parameters = [self._reducer.gradients.parameters[index] for index in order]
        costs = measure_allreduce(self._comm, self._algorithm)
        cuts = cut_by_strategy(self._sizes(parameters), ready, costs, self._strategy)
        self._reducer.free()
        self._make_reducer(parameters, cuts)
        self._planned = True
        LOG.info(
            "DataParallel: %d buckets (%s) after step %d: an allreduce takes %.3g s + %.3g s/B",
            len(cuts),
            self._strategy,
            self._step,
            *costs,
        )

    def _count_active(self, share: float) -> float:
        """Return the number of ranks that are still training. Collective.

        A rank that is still training passes a `share` of 1, and a rank that has finished passes 0.
        """
        self._active[0] = share
        collectives.allreduce(self._active, self._comm)
        return float(self._active[0])


def _check_arguments(module: object, comm: object, others: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError for an unknown argument, a `module` that is not on the host, or a bad `comm`."""
    for name in others:
        why = ": mpips works on CPU tensors, leave it out" if "device" in name else ": leave it out"
        raise TypeError(f"DataParallel has no argument {name}{why}")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DataParallel: module is of type {type(module).__name__}: pass a torch.nn.Module")
    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"DataParallel: comm is of type {type(comm).__name__}: pass an mpi4py communicator, or None")
    check_on_host([*module.parameters(), *module.buffers()], "DataParallel")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_inference():
            raise ValueError(
                f"DataParallel: parameter {name!r} was made in torch.inference_mode(), and PyTorch gives "
                "it no gradient: make the model outside of that mode"
            )
