"""Let XLA call Python on XLA's own buffers, through a handler of XLA's foreign function interface (FFI).

The structures below come from XLA's public header `xla/ffi/api/c_api.h`. They declare only the fields that we read.
When a handler is registered, XLA asks for its version. At that moment we compare the sizes of XLA's structures with
ours. If they do not fit, `is_available` is False, and a line in the log "mpips.jax" gives the reason.
"""

from __future__ import annotations

import _thread
import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from mpips.collectives import log
from mpips.collectives.arrays import Flat
from mpips.ending.process import before_mpi_ends

LOG = log.get("mpips.jax")
TARGET = "mpips_call"
# The version of the interface that this module is written for. It does not read fields that XLA has added later.
MAJOR, MINOR = 0, 1
# Constants from the header: the type of an extension that asks for metadata, and the error code "aborted".
METADATA = 1
ABORTED = 10
# A site (`Site`) caches its arrays for at most this many combinations of addresses.
MOST_PLACES = 64
# If the arrays of a call have at most this many bytes in all, they are copied into arrays of our own. XLA moves small
# buffers at every call, but `collectives` can reuse a plan only for arrays at the same addresses.
SMALL = 32 << 10
# A function that runs a call on its inputs and outputs. An output that reuses the memory of an input is the same array.
Run: TypeAlias = Callable[[list[NDArray[Any]], list[NDArray[Any]]], None]


class Extension(ctypes.Structure):
    """The beginning of every extension of a structure."""


Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(Extension)),
]


class ApiVersion(ctypes.Structure):
    """The version of the interface."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class Metadata(ctypes.Structure):
    """The description that a handler gives of itself when it is registered."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("version", ApiVersion), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    """XLA's request for a handler's `Metadata`."""

    _fields_ = [("base", Extension), ("metadata", ctypes.POINTER(Metadata))]


class Buffer(ctypes.Structure):
    """An array. Only `data` is read, because dtype and shape are already known from tracing."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    ]


class BufferList(ctypes.Structure):
    """The inputs of a call, or its outputs."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Scalar(ctypes.Structure):
    """An attribute that is a single number."""

    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64))]


class Attributes(ctypes.Structure):
    """The arguments of a call that are not arrays. Our calls have only one such argument, the number of the site."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.POINTER(Scalar))),
    ]


class ErrorArguments(ctypes.Structure):
    """The message and the code for an error that XLA creates."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


class Api(ctypes.Structure):
    """XLA's table of functions for handlers, up to the last function that we use."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", ApiVersion),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArguments))),
    ]


class CallFrame(ctypes.Structure):
    """One call of a handler."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(Extension)),
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("inputs", BufferList),
        ("outputs", BufferList),
        ("attributes", Attributes),
    ]


class Site:
    """A place in a program where a call is made, with the shapes and dtypes that the call was traced with.

    Args:
        run: The function that runs the call.
        turn: A lock that is held while the call runs (see `_turns`).
        inputs: The inputs, as objects with a shape and a dtype.
        outputs: The outputs, in the same form.
    """

    def __init__(self, run: Run, turn: threading.Lock, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._run = run
        self.turn = turn
        self._inputs = _kinds(inputs)
        self._outputs = _kinds(outputs)
        # addresses of all arrays -> the arrays
        self._views: dict[tuple[int, ...], tuple[list[NDArray[Any]], list[NDArray[Any]]]] = {}
        # Arrays of our own for a call with little data (SMALL), or None. If the inputs and outputs have the same shapes
        # and dtypes, the call works in place.
        self._small: tuple[list[NDArray[Any]], list[NDArray[Any]]] | None = None
        if sum(kind.nbytes for kind in (*self._inputs, *self._outputs)) <= SMALL:
            own = [np.empty(kind.shape, kind.dtype) for kind in self._inputs]
            alike = self._inputs == self._outputs
            self._small = own, own if alike else [np.empty(kind.shape, kind.dtype) for kind in self._outputs]
            self._copies_in, self._copies_out = _bytes(own), _bytes(self._small[1])

    def call(self, frame: CallFrame) -> None:
        """Run the call on the arrays of a frame. The ordering tokens that follow the arrays are ignored."""
        sources, targets = frame.inputs.items, frame.outputs.items
        if self._small is not None:
            for n, own in self._copies_in:
                own.raw = type(own).from_address(Buffer.from_address(sources[n]).data).raw
            self._run(*self._small)
            for n, own in self._copies_out:
                type(own).from_address(Buffer.from_address(targets[n]).data).raw = own.raw
            return
        places = (
            *[Buffer.from_address(sources[n]).data or 0 for n in range(len(self._inputs))],
            *[Buffer.from_address(targets[n]).data or 0 for n in range(len(self._outputs))],
        )
        views = self._views.get(places)
        if views is None:
            if len(self._views) >= MOST_PLACES:
                self._views.clear()
            views = self._views[places] = self._view(places)
        self._run(*views)

    def _view(self, places: tuple[int, ...]) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """Return arrays in XLA's own memory. An output that reuses the memory of an input is the same array."""
        inputs = [kind.view(place) for kind, place in zip(self._inputs, places)]
        outputs = [kind.view(place) for kind, place in zip(self._outputs, places[len(inputs) :])]
        for n, pair in enumerate(zip(self._inputs, self._outputs)):
            if pair[0] == pair[1] and places[n] == places[len(inputs) + n]:
                outputs[n] = inputs[n]
        return inputs, outputs


class _Kind(NamedTuple):
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    def view(self, place: int) -> NDArray[Any]:
        """Return an array with this shape and dtype at an address. The array does not keep the memory alive."""
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        return Flat(place, self.nbytes // self.dtype.itemsize, self.dtype).vector().reshape(self.shape)


def _kinds(arrays: Sequence[Any]) -> list[_Kind]:
    return [_Kind(one.shape, np.dtype(one.dtype), int(one.size) * np.dtype(one.dtype).itemsize) for one in arrays]


def _bytes(arrays: Sequence[NDArray[Any]]) -> list[tuple[int, Any]]:
    """Return (index, ctypes view of the bytes) for each array that is not empty."""
    return [
        (n, (ctypes.c_char * one.nbytes).from_address(one.__array_interface__["data"][0]))
        for n, one in enumerate(arrays)
        if one.nbytes
    ]


_sites: list[Site] = []
# (call, shapes and dtypes) -> index in _sites
_numbers: dict[Any, int] = {}
# identity of a communicator or store -> lock, so that its calls run one after another, even on several XLA threads
_turns: dict[Hashable, threading.Lock] = {}
# differences between the interface of this version of XLA and the interface that we expect
_misfit: list[str] = []


def number_site(call: Hashable, run: Run, order: Hashable, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return the number of the site for a call with these shapes and dtypes. Equal calls get the same number.

    The number is compiled into the program. Calls with equal `order` run one after another.
    """
    key = (call, *[(one.shape, str(one.dtype)) for one in (*inputs, *outputs)])
    if key not in _numbers:
        _numbers[key] = len(_sites)
        _sites.append(Site(run, _turns.setdefault(order, threading.Lock()), inputs, outputs))
    return _numbers[key]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _handle(address: int) -> int | None:
    """Run a call, or answer XLA's request for the version. Return the address of an XLA error, or None."""
    frame = CallFrame.from_address(address)
    if frame.extension:
        _tell_version(frame)
        return None
    try:
        site = _sites[frame.attributes.items[0].contents.value.contents.value]
        with site.turn:
            site.call(frame)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            # This makes the main thread raise KeyboardInterrupt when XLA returns.
            _thread.interrupt_main()
        sentence = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        said = ErrorArguments(ctypes.sizeof(ErrorArguments), None, sentence.encode(), ABORTED)
        made: int | None = frame.api.contents.create_error(ctypes.byref(said))
        return made
    return None


def _tell_version(frame: CallFrame) -> None:
    """Answer XLA's request for the version, and note how XLA's interface differs from the one that we expect."""
    base = frame.extension.contents
    if base.type != METADATA:
        _misfit.append(f"an extension of type {base.type}")
        return
    metadata = ctypes.cast(frame.extension, ctypes.POINTER(MetadataExtension)).contents.metadata.contents
    metadata.version.major, metadata.version.minor = MAJOR, MINOR
    api = frame.api.contents
    if api.version.major != MAJOR:
        _misfit.append(f"version {api.version.major}.{api.version.minor}")
    for given, read in ((frame, CallFrame), (api, Api), (metadata, Metadata)):
        if given.struct_size < ctypes.sizeof(read) - ctypes.alignment(read) + 1:
            _misfit.append(f"a {read.__name__} of {given.struct_size} bytes")


@cache
def is_available() -> bool:
    """True if calls can go through XLA's foreign function interface: on CPUs, if its structures are as we expect."""
    if jax.default_backend() != "cpu":
        return False
    try:
        pointer = ctypes.cast(_handle, ctypes.c_void_p).value
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(pointer), platform="cpu")
    # Another version of JAX may raise any exception.
    except Exception as error:
        _misfit.append(f"{type(error).__name__}: {error}")
    if _misfit:
        LOG.warning(
            "XLA's foreign function interface of JAX %s is not as it is known here (%s): collectives are "
            "callbacks, without gradients",
            jax.__version__,
            "; ".join(_misfit),
        )
        return False
    # Calls under way must end before communicators are closed.
    before_mpi_ends(jax.effects_barrier)
    return True
