"""Optimizers as data: named, checked, encoded without pickle, applied in place to any interval of a 1-D array."""

from mpips.optimizers.adaptive import AdaGrad, Adam, AdamW, Moments, RMSProp, Squares
from mpips.optimizers.base import (
    Number,
    Optimizer,
    RateSchedule,
    State,
    Updater,
    at,
    by_blocks,
    changed,
    check,
    initial,
    working_dtype,
    zeros,
)
from mpips.optimizers.elastic import Elastic1, Elastic2
from mpips.optimizers.registry import (
    OPTIMIZERS,
    SCHEDULES,
    create,
    decode,
    decode_numbers,
    encode,
    encode_numbers,
    register,
)  # fmt: skip
from mpips.optimizers.schedules import Chained, Constant, Cosine, Groups, StepDecay, Warmup
from mpips.optimizers.sgd import SGD, Add, Momentum

for _optimizer in (SGD, AdaGrad, RMSProp, Adam, AdamW, Elastic1, Elastic2, Add):
    register(_optimizer)
for _schedule in (Constant, StepDecay, Cosine, Warmup, Chained):
    register(_schedule)

__all__ = [
    "OPTIMIZERS", "SCHEDULES", "SGD", "AdaGrad", "Adam", "AdamW", "Add", "Chained", "Constant", "Cosine", "Elastic1",
    "Elastic2", "Groups", "Moments", "Momentum", "Number", "Optimizer", "RMSProp", "RateSchedule", "Squares", "State",
    "StepDecay", "Updater", "Warmup", "at", "by_blocks", "changed", "check", "create", "decode", "decode_numbers",
    "encode", "encode_numbers", "initial", "register", "working_dtype", "zeros",
]  # fmt: skip
