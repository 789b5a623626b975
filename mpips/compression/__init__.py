"""Gradient compression with error feedback: the sender keeps the part that a payload leaves out in a residual."""

from mpips.compression.compressors import (
    BLOCK,
    Compressor,
    Half,
    Integers,
    OneBit,
    Residuals,
    TopK,
    TwoBit,
    bit_bytes,
    bits_of,
    blocks,
    put,
    put_bits,
)
from mpips.compression.registry import COMPRESSORS, create, options, register

__all__ = [
    "BLOCK",
    "COMPRESSORS",
    "Compressor",
    "Half",
    "Integers",
    "OneBit",
    "Residuals",
    "TopK",
    "TwoBit",
    "bit_bytes",
    "bits_of",
    "blocks",
    "create",
    "options",
    "put",
    "put_bits",
    "register",
]
