"""Optimizers as data: found by name, checked, encoded without pickle, and applied in place to 1-D arrays."""

from mpips.optimizers.adaptive import AdaGrad, Adam, AdamW, RMSProp
from mpips.optimizers.base import (
    Number,
    Optimizer,
    RateSchedule,
    State,
    at,
    changed,
    check,
    initial,
    working_dtype,
    zeros,
)
from mpips.optimizers.elastic import Elastic1, Elastic2
from mpips.optimizers.equation import Equation, Updater
from mpips.optimizers.registry import (
    OPTIMIZERS,
    SCHEDULES,
    create,
    decode,
    decode_numbers,
    describe,
    encode,
    encode_numbers,
    of_gradients,
    register,
)
from mpips.optimizers.schedules import Chained, Constant, Cosine, Groups, StepDecay, Warmup
from mpips.optimizers.sgd import SGD, Add

for _optimizer in (SGD, AdaGrad, RMSProp, Adam, AdamW, Elastic1, Elastic2, Add):
    register(_optimizer)
for _schedule in (Constant, StepDecay, Cosine, Warmup, Chained):
    register(_schedule)

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Add",
    "Chained",
    "Constant",
    "Cosine",
    "Elastic1",
    "Elastic2",
    "Equation",
    "Groups",
    "Number",
    "Optimizer",
    "RMSProp",
    "RateSchedule",
    "State",
    "StepDecay",
    "Updater",
    "Warmup",
    "at",
    "changed",
    "check",
    "create",
    "decode",
    "decode_numbers",
    "describe",
    "encode",
    "encode_numbers",
    "initial",
    "of_gradients",
    "register",
    "working_dtype",
    "zeros",
]
