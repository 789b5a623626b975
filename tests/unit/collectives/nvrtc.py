"""NVIDIA's run-time compiler from PyPI, for tests that compile CUDA sources without a GPU."""

from __future__ import annotations

import ctypes
import importlib.metadata
from functools import cache
from typing import Any

PACKAGE = "nvidia-cuda-nvrtc-cu12"
ARCHITECTURE = "sm_90"


class Refused(Exception):
    """What the compiler says of a source."""


@cache
def library() -> Any:
    """libnvrtc, or None where the package is missing."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [file.locate() for file in files if file.name.startswith("libnvrtc.so")]
    return ctypes.CDLL(str(found[0])) if found else None


def compile_source(source: str) -> str:
    """The PTX of a CUDA source for `ARCHITECTURE`, with no header at hand. Raises Refused with the compiler's log."""
    nvrtc, program = library(), ctypes.c_void_p()
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17"]
    _call(nvrtc.nvrtcCreateProgram, ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            raise Refused(_text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
        return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        _call(nvrtc.nvrtcDestroyProgram, ctypes.byref(program))


def _text(size_of: Any, get: Any, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _call(size_of, program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _call(get, program, text)
    return text.value.decode()


def _call(function: Any, *arguments: Any) -> None:
    error = function(*arguments)
    if error:
        raise RuntimeError(f"{function.__name__} gave error {error}")
