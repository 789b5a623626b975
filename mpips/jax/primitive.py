"""A JAX primitive that makes every call of mpips. A `JaxCall` defines how it is run, differentiated and batched.

XLA starts every operation whose inputs are ready, on several threads, in an order that differs from rank to rank.
Collectives would then deadlock. To prevent this, the primitive has an ordered JAX effect. Each call takes a token and
returns a token for the next call, also through loops and branches and from one program to the next. So calls run one
after another in program order, on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from numpy.typing import NDArray

from mpips.jax import ffi

# a pytree of arrays
Tree: TypeAlias = Any
Arrays: TypeAlias = Sequence[jax.Array]


class JaxCall(ABC):
    """An operation of all ranks on some arrays. `jit` treats calls that compare equal as the same call."""

    # True if XLA may put output n into the memory of input n when nothing else reads input n
    in_place = False

    @property
    @abstractmethod
    def order(self) -> Hashable:
        """The identity of the communicator or store. Calls with the same identity run one after another."""

    @abstractmethod
    def shapes(self, inputs: Sequence[Any]) -> list[Any]:
        """Return a `jax.ShapeDtypeStruct` for each output. `inputs` are objects with a shape and a dtype."""

    @abstractmethod
    def run(self, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> None:
        """Read the inputs and write the outputs. Blocking."""

    def batch(self, x: jax.Array, axis: int) -> tuple[jax.Array, int]:
        """Return the input for one call on a whole batch, and the axis of the batch in the output.

        `axis` is the axis of the batch in `x`.
        """
        raise NotImplementedError(f"jax.vmap: {self} has no batched form: call it outside")

    def own(self, x: jax.Array) -> jax.Array:
        """Return the contribution of this rank's input to the result: `x`, or its share in a mean. See `bind_own`."""
        return x

    def tangent(self) -> JaxCall:
        """Return the call that maps tangents of the inputs to tangents of the outputs."""
        raise NotImplementedError(f"{self} has no gradient: call it outside of jax.grad, or on jax.lax.stop_gradient")

    def transpose(self, cotangents: list[jax.Array]) -> list[jax.Array]:
        """Return the cotangents of the inputs, given the cotangents of the outputs."""
        raise NotImplementedError(f"{self} has no gradient: call it outside of jax.grad, or on jax.lax.stop_gradient")


def bind(call: JaxCall, inputs: Arrays) -> list[jax.Array]:
    """Add a call to the program that is being traced, or run it at once. Return its outputs."""
    arrays = [jax.numpy.asarray(one) for one in inputs]
    if ffi.is_available():
        results: list[jax.Array] = _primitive().bind(*arrays, call=call)
        return results
    shapes = call.shapes(arrays)

    def run(*sources: jax.Array) -> list[NDArray[Any]]:
        outputs = [np.empty(one.shape, one.dtype) for one in shapes]
        call.run([np.ascontiguousarray(one).reshape(np.shape(one)) for one in sources], outputs)
        return outputs

    return list(io_callback(run, shapes, *arrays, ordered=True))


def bind_own(call: JaxCall, x: jax.Array) -> jax.Array:
    """Apply `call.own` to x. Local, so no rank waits.

    This function is linear, and its transpose is the call itself.
    """
    return _own().bind(x, call=call)


@cache
def _own() -> Primitive:
    primitive = Primitive("mpips_own")
    primitive.def_impl(lambda x, call: call.own(x))
    primitive.def_abstract_eval(lambda x, call: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, call: call.own(x), multiple_results=False))
    ad.deflinear2(primitive, lambda cotangent, x, call: bind(call, [cotangent]))
    batching.defvectorized(primitive)
    return primitive


@cache
def _primitive() -> Primitive:
    """Create the primitive.

    JAX has no public way to make a primitive ordered, so this function uses some of JAX's internals.
    """
    from jax._src import core, effects

    class Ordered(effects.Effect):
        """The effect that orders the calls of mpips."""

    for known in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        known.add_type(Ordered)
    ordered, primitive = Ordered(), Primitive("mpips_call")
    primitive.multiple_results = True

    def lower(context: mlir.LoweringRuleContext, *operands: mlir.ir.Value, call: JaxCall) -> list[mlir.ir.Value]:
        number = ffi.number_site(call, call.run, call.order, context.avals_in, context.avals_out)
        # XLA may reuse the memory of the operands. The token, which follows the operands, has no memory to reuse.
        aliases = {n: n for n in range(len(operands))} if call.in_place else None
        rule = jax.ffi.ffi_lowering(ffi.TARGET, has_side_effect=True, operand_output_aliases=aliases)
        with_token = context.replace(
            avals_in=[*context.avals_in, core.abstract_token], avals_out=[*context.avals_out, core.abstract_token]
        )
        *outputs, token = rule(with_token, *operands, context.tokens_in.get(ordered), site=np.int64(number))
        context.set_tokens_out(mlir.TokenSet({ordered: token}))
        return outputs

    def evaluate(*inputs: core.AbstractValue, call: JaxCall) -> tuple[list[core.AbstractValue], set[Ordered]]:
        return [core.ShapedArray(output.shape, output.dtype) for output in call.shapes(inputs)], {ordered}

    primitive.def_impl(lambda *inputs, call: _compiled(primitive, call)(*inputs))
    primitive.def_effectful_abstract_eval(evaluate)
    mlir.register_lowering(primitive, lower, platform="cpu")
    ad.primitive_jvps[primitive], ad.primitive_transposes[primitive] = _differentiate, _transpose
    batching.primitive_batchers[primitive] = _batch
    return primitive


def _differentiate(primals: Arrays, tangents: Arrays, *, call: JaxCall) -> tuple[Arrays, Arrays]:
    outputs = _primitive().bind(*primals, call=call)
    # Only inputs whose tangent is not zero take part in the call for the tangents.
    which = [n for n, one in enumerate(tangents) if not isinstance(one, ad.Zero)]
    moved = [one if n in which else ad.Zero(one.aval.update(shape=outputs[n].shape)) for n, one in enumerate(tangents)]
    for n, one in zip(which, _primitive().bind(*[tangents[n] for n in which], call=call.tangent()) if which else ()):
        moved[n] = one
    return outputs, moved


def _transpose(cotangents: Arrays, *inputs: jax.Array, call: JaxCall) -> Sequence[jax.Array | None]:
    which = [n for n, x in enumerate(cotangents) if not isinstance(x, ad.Zero)]
    transposed = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in inputs]
    for n, x in zip(which, call.transpose([cotangents[n] for n in which]) if which else ()):
        transposed[n] = x
    return transposed


def _batch(inputs: Arrays, axes: Sequence[int | None], *, call: JaxCall) -> tuple[list[jax.Array], list[int | None]]:
    pairs = [(x, axis) if axis is None else call.batch(x, axis) for x, axis in zip(inputs, axes)]
    return _primitive().bind(*[x for x, _ in pairs], call=call), [axis for _, axis in pairs]


@cache
def _compiled(primitive: Primitive, call: JaxCall) -> Callable[..., list[jax.Array]]:
    """Return a compiled program that consists of only this call."""
    return jax.jit(partial(primitive.bind, call=call))
