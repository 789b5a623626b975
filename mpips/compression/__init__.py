"""Gradient compression with error feedback: what a payload leaves out stays in the sender's residual."""

from mpips.compression.base import BLOCK, Compressor, Residuals, bit_bytes, bits_of, blocks, put, put_bits
from mpips.compression.compressors import Half, OneBit, TopK, TwoBit
from mpips.compression.registry import COMPRESSORS, create, options, register

__all__ = [
    "BLOCK", "COMPRESSORS", "Compressor", "Half", "OneBit", "Residuals", "TopK", "TwoBit", "bit_bytes", "bits_of",
    "blocks", "create", "options", "put", "put_bits", "register",
]  # fmt: skip
