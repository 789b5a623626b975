"""The options of a job: one frozen record, read once, from the arguments of `mpips.create` and the environment.

Every field may be given as an argument (`create(kind, servers=2)`) or as a variable (`MPIPS_SERVERS=2`). An argument
overrides the variable. The documentation and the options of `mpips run` are made from the table `FIELDS`.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mpips.collectives import log
from mpips.collectives.errors import did_you_mean, of_caller
from mpips.collectives.kernels import engine
from mpips.collectives.recorder import own as recorder

PREFIX = "MPIPS_"
# Variables that begin with MPIPS_ but are not options of a job. They may differ between ranks.
OF_PROCESSES = (
    engine.VARIABLE,
    engine.FOLDER_VARIABLE,
    log.LEVEL_VARIABLE,
    log.FOLDER_VARIABLE,
    log.FORMAT_VARIABLE,
    recorder.VARIABLE,
    recorder.DUMP_VARIABLE,
)

# Kinds have MXNet's names. The aliases are the names in the MXNET-MPI paper (section 4.2.1).
KINDS = ("local", "dist_sync", "dist_async", "mpi_sync", "mpi_async")
ALIASES = {"synchronous-mpi": "mpi_sync", "asynchronous-mpi": "mpi_async"}


class OptionError(ValueError):
    """An option has a bad value, or options contradict each other or the size of the job."""

    __module__ = "mpips"
    of_caller = True  # see `collectives.errors`


class Field(NamedTuple):
    """One option of a job."""

    name: str
    default: int | float | str | bool
    # the lowest allowed number, or None without a lower limit
    least: float | None
    # the allowed values of a text option, or () if any value is allowed
    choices: tuple[str, ...]
    # the explanation that help and documentation show
    text: str


# Limits of options that are integers: 64 bits, as in files and in messages between ranks.
LEAST, MOST = -(2**63), 2**63 - 1

FIELDS = (
    Field(
        "servers",
        0,
        0,
        (),
        "number of server processes (the last ranks of the job); 0: no servers, and every worker keeps the weights",
    ),
    Field(
        "clients",
        1,
        1,
        (),
        "in an mpi_* store, number of clients: groups of about equally many workers, each of which pushes as one",
    ),
    Field(
        "workers",
        0,
        0,
        (),
        "number of workers that the job must have; 0: every rank that is not a server or a spare is a worker",
    ),
    Field(
        "mirrors",
        0,
        0,
        (),
        "1: each shard (a server's part of a key) has a copy on another node, so the job can lose one node",
    ),
    Field(
        "masters",
        "one",
        None,
        ("one", "all"),
        "which workers of a client exchange data with the servers: `one` (its rank 0) or `all`",
    ),
    Field(
        "staleness",
        -1,
        -1,
        (),
        "in an asynchronous store, how many steps a worker may be ahead of the slowest worker; -1: no limit",
    ),
    Field(
        "quorum",
        -1,
        -1,
        (),
        "in an asynchronous store, how many clients' pushes make one update; -1: each push is an update",
    ),
    Field(
        "grace_seconds",
        0.0,
        0,
        (),
        "with `quorum`: how many seconds a round waits for the remaining clients after enough have pushed",
    ),
    Field("big_array", 250_000, 1, (), "arrays of at least this many elements are split over all servers"),
    Field(
        "block_bytes",
        2_097_152,
        4096,
        (),
        "the most bytes that a server sums at a time (a block); workers can read a block as soon as it is summed",
    ),
    Field(
        "small_bytes", 32_768, 0, (), "arrays of at most this many bytes are always copied, so their push never waits"
    ),
    Field(
        "chunk_bytes",
        131_072,
        4096,
        (),
        "largest message between nodes, in bytes; a larger array is sent in several messages",
    ),
    Field(
        "chunks_in_flight", 8, 1, (), "how many messages of one array may be on their way between two ranks at a time"
    ),
    Field("shared_memory", True, None, (), "processes on one node exchange arrays through shared memory"),
    Field(
        "spares",
        -1,
        -1,
        (),
        "number of ranks, the last of the job, that wait to replace dead ones; -1: the death of a rank ends the store",
    ),
    Field(
        "stall_seconds",
        60.0,
        0.001,
        (),
        "after a wait of this length a warning names what is waited for and the missing ranks",
    ),
    Field("timeout_seconds", 300.0, 0, (), "after a wait of this length the generation ends with StallError; 0: never"),
    Field(
        "checkpoint", "", None, (), "the folder to which the job's first store saves itself, and from which it resumes"
    ),
    Field("every", 0, 0, (), "with `checkpoint`: the store saves itself after this many rounds of every key"),
    Field(
        "check_finite",
        False,
        None,
        (),
        "True: a push of NaN or infinity raises an error that names the rank, key, push and step",
    ),
)


@dataclass(frozen=True)
class Options:
    """The options of a job, equal on every rank (`roles` compares them). `FIELDS` has their meanings."""

    servers: int = 0
    clients: int = 1
    workers: int = 0
    mirrors: int = 0
    masters: str = "one"
    staleness: int = -1
    quorum: int = -1
    grace_seconds: float = 0.0
    big_array: int = 250_000
    block_bytes: int = 2_097_152
    small_bytes: int = 32_768
    chunk_bytes: int = 131_072
    chunks_in_flight: int = 8
    shared_memory: bool = True
    spares: int = -1
    stall_seconds: float = 60.0
    timeout_seconds: float = 300.0
    checkpoint: str = ""
    every: int = 0
    check_finite: bool = False

    def __post_init__(self) -> None:
        for field in FIELDS:
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name), field.name))
        if self.workers and self.clients > self.workers:
            raise OptionError(
                f"clients={self.clients} is more than workers={self.workers}: ask for fewer, a client needs a worker"
            )
        if self.quorum == 0:
            raise OptionError("quorum=0 closes no round: give a number of clients, at least 1, or leave it out")
        if self.grace_seconds and self.quorum < 0:
            raise OptionError(
                f"grace_seconds={self.grace_seconds} is the time after a quorum, and there is none: give "
                "quorum, too, or leave it out"
            )
        if 0 < self.timeout_seconds <= self.grace_seconds:
            raise OptionError(
                f"grace_seconds={self.grace_seconds} is not below timeout_seconds={self.timeout_seconds},"
                " after which a wait ends the generation: give less, or a longer timeout_seconds"
            )
        if self.staleness >= 0 and self.quorum >= 0:
            raise OptionError(
                f"staleness={self.staleness} and quorum={self.quorum} are two ways to bound how far "
                "workers are apart: leave one of the two out"
            )
        if self.mirrors > 1:
            raise OptionError(f"mirrors={self.mirrors} is more than 1: one copy on another node is all that there is")

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give another process these options. Defaults are left out."""
        values = {f.name: getattr(self, f.name) for f in FIELDS if getattr(self, f.name) != f.default}
        return {PREFIX + name.upper(): str(int(v) if isinstance(v, bool) else v) for name, v in values.items()}

    def workers_of(self, world_size: int) -> int:
        """Return the number of workers in a job of `world_size` ranks.

        Raise OptionError if there are too few ranks, or if the option `workers` asks for another number.
        """
        spares = max(self.spares, 0)
        workers = world_size - self.servers - spares
        also = f" and spares={spares}" if spares else ""
        if workers < 1:
            least = self.servers + spares + 1
            raise OptionError(
                f"servers={self.servers}{also} and at least one worker need {least} ranks, but the job has "
                f"{world_size}: start more (`mpips run --servers {self.servers}` or mpirun -n {least}) or ask for "
                f"fewer servers{' or spares' if spares else ''}"
            )
        if self.workers and workers != self.workers:
            ranks = self.workers + self.servers + spares
            started = f"--servers {self.servers} --workers {self.workers}{f' --spares {spares}' if spares else ''}"
            raise OptionError(
                f"workers={self.workers} and servers={self.servers}{also} need {ranks} ranks, but the job has "
                f"{world_size}: start it by `mpips run {started}` or mpirun -n {ranks}, or ask for what there is "
                "(`mpips doctor` tells why a launcher's ranks may each be a world of their own)"
            )
        return workers

    def clients_of(self, kind: str, world_size: int) -> int:
        """Return the number of clients of a store of this kind. In dist_* kinds every worker is a client.

        Raise OptionError if there are more clients than workers, if `quorum` is more than the number of clients, or if
        the kind needs a server and the job has none.
        """
        workers = self.workers_of(world_size)
        if kind.endswith("_async") and not self.servers:
            raise OptionError(
                f"a store of kind {kind} needs a server (servers=0), as without one nothing can be asynchronous: start "
                f"the job with servers, as `mpips run --servers 1`, or ask for {kind.replace('_async', '_sync')}"
            )
        clients = self.clients if kind.startswith("mpi_") else workers
        if clients > workers:
            raise OptionError(
                f"clients={self.clients} is more than the {workers} workers of the job: ask for fewer, a client needs "
                "a worker"
            )
        if kind.endswith("_async") and self.quorum > clients:
            raise OptionError(
                f"quorum={self.quorum} is more than the {clients} clients of this {kind} store: a round would never "
                "close; ask for fewer"
            )
        return clients


def _checked(field: Field, value: Any, name: str) -> Any:
    """Convert a value to the type of the field. Raise OptionError, which says what is allowed, if the value is bad."""
    kind = type(field.default)
    try:
        if kind is bool:
            return _as_bool(value)
        if kind is str:
            value = str(value).strip().lower() if field.choices else os.fspath(value)
        elif kind is int:
            if isinstance(value, float) and not value.is_integer():
                raise ValueError(value)
            value = int(value)
        else:
            value = float(value)
    except (TypeError, ValueError, OverflowError):
        word = {int: "a whole number", float: "a number", bool: "0 or 1"}[kind]
        raise OptionError(f"{name}={value!r} is not {word} ({field.text})") from None
    if kind is float and not math.isfinite(value):
        raise OptionError(f"{name}={value} must be finite ({field.text})")
    if field.choices and value not in field.choices:
        raise OptionError(f"{name}={value!r} is none of {', '.join(field.choices)} ({field.text})")
    if field.least is not None and value < field.least:
        raise OptionError(f"{name}={value} is less than {field.least} ({field.text})")
    if kind is int and value > MOST:
        raise OptionError(f"{name}={value} is more than {MOST} ({field.text})")
    return value


def check_saves(options: Options) -> None:
    """Raise OptionError if only one of `checkpoint` and `every` is given."""
    if bool(options.checkpoint) != bool(options.every):
        raise OptionError(
            f"checkpoint={options.checkpoint!r} and every={options.every}: give both, a folder and the "
            "number of rounds between two saves, or neither"
        )


def _as_bool(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    word = str(value).strip().lower()
    if word not in words:
        raise ValueError(value)
    return words[word]


def read(arguments: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Options:
    """Read each option from the arguments, else from its `MPIPS_*` variable, else use the default.

    Ignore arguments of None.

    Raises:
        OptionError: An argument or variable is unknown (the message lists the known ones), or a value is bad. This
            covers also the variables that choose the engine of kernels, the log's level and the recorder.
    """
    env = os.environ if environment is None else environment
    known = {field.name: field for field in FIELDS}
    values: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in OF_PROCESSES:
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in known:
            names = [*known, *(other[len(PREFIX) :].lower() for other in OF_PROCESSES)]
            perhaps = _perhaps(name, names, lambda word: PREFIX + word.upper())
            raise OptionError(f"the variable {variable} is unknown{perhaps}")
        values[name] = _checked(known[name], text, variable)
    try:
        engine.chosen_engine(env)
        log.read_variables(env)
        recorder.is_wanted(env)
    except ValueError as error:
        raise OptionError(str(error)) from None
    for name, value in (arguments or {}).items():
        if name not in known:
            raise OptionError(f"create() has no option {name!r}{_perhaps(name, list(known), str)}")
        if value is not None:
            values[name] = _checked(known[name], value, name)
    return Options(**values)


def _perhaps(name: str, known: Sequence[str], shown: Callable[[str], str]) -> str:
    """Return the end of an error message about an unknown name.

    It has the most similar known name, and all known names.
    """
    near = difflib.get_close_matches(name, known, 1)
    return f"{f': did you mean {shown(near[0])}?' if near else ';'} known: {', '.join(map(shown, known))}"


def check_kind(kind: str, arguments: Mapping[str, Any]) -> None:
    """Raise OptionError if arguments ask for something that a store of this kind cannot have.

    A `local` store has no other processes, and only an asynchronous store has staleness or a quorum. Environment
    variables are not checked, because they apply to the whole job, which may have stores of several kinds.
    """
    chosen = read(arguments, {})
    if chosen.staleness >= 0 and not kind.endswith("_async"):
        others = " or ".join(name for name in KINDS if name.endswith("_async"))
        raise OptionError(
            f"staleness={chosen.staleness} in a store of kind {kind}, in which no worker runs ahead: ask for {others}, "
            "or leave staleness out"
        )
    if chosen.quorum >= 0 and not kind.endswith("_async"):
        raise OptionError(
            f"quorum={chosen.quorum} in a store of kind {kind}, whose rounds take all clients: ask for dist_async or "
            "mpi_async with servers, or leave quorum out"
        )
    for name, most in (("servers", 0), ("workers", 1), ("clients", 1), ("mirrors", 0)):
        value = getattr(chosen, name)
        if kind == "local" and value > most:
            others = ", ".join(KINDS[1:])
            raise OptionError(f"{name}={value} in a store of kind local, which is one process alone: ask for {others}")


def uneven(workers: int, clients: int) -> str:
    """Return the warning that clients have different numbers of workers."""
    return f"mpips: {workers} workers do not split evenly over {clients} clients; some have one more"


def kind_of(name: object) -> str:
    """Return the kind of store for a name or alias. Case does not matter.

    Raise TypeError if `name` is not a str, and OptionError, which lists the known kinds, if the name is unknown.
    """
    if not isinstance(name, str):
        known = ", ".join(KINDS)
        raise of_caller(TypeError(f"the kind of a store is a string, one of {known}; got {type(name).__name__}"))
    word = name.strip().lower()
    word = ALIASES.get(word, word)
    if word not in KINDS:
        perhaps = did_you_mean(word.replace("-", "_"), KINDS)
        known = f"{', '.join(KINDS)} (and {', '.join(ALIASES)})"
        raise OptionError(f"unknown kind of store {name!r}{perhaps}; known: {known}")
    return word


def table() -> str:
    """Return all options as a Markdown table. A test checks that the reference page contains this table."""
    rows = [f"| `{f.name}` | `{PREFIX}{f.name.upper()}` | `{f.default}` | {f.text} |" for f in FIELDS]
    return "\n".join(["| argument | variable | default | meaning |", "|---|---|---|---|", *rows])


assert [f.name for f in FIELDS] == [f.name for f in fields(Options)], "FIELDS and Options name the same options"
