"""The log of a job: a line for each event of a rank, with the rank's number, role, generation and training step.

Modules get their loggers from `get`. Their names begin with "mpips". A program that configures `logging` itself sees
our warnings among its own. It sees our records of lower levels if it asks for them, by the variables below or by
`logging.getLogger("mpips").setLevel(logging.INFO)`. Records have the attributes `rank`, `role`, `generation` and
`step`, and their messages begin with the rank.

Without such a configuration, `MPIPS_LOG=info` (or debug, warning) shows the records on standard error. `MPIPS_LOG_DIR`
writes them into a folder instead, with a file for each rank, and `MPIPS_LOG_FORMAT=json` makes each line a JSON object.
`mpips run --log`, `--log-dir` and `--log-format` set these variables. They give each job a folder of its own
(`folder_of_job`), and `merge` joins its files by time when the job has ended.
"""

from __future__ import annotations

import atexit
import heapq
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TextIO, cast

from mpips.collectives.recorder.own import rank_state

LEVEL_VARIABLE, FOLDER_VARIABLE, FORMAT_VARIABLE = "MPIPS_LOG", "MPIPS_LOG_DIR", "MPIPS_LOG_FORMAT"
LEVELS = ("debug", "info", "warning")
FORMATS = ("text", "json")
# the name, without its suffix, of the file with the lines of all ranks
MERGED = "job"
SUFFIXES = {"text": ".log", "json": ".jsonl"}


class RankLogRecord(logging.LogRecord):
    """A log record with the attributes that `_stamp` adds. The first four are those of `recorder.own.rank_state`."""

    rank: int
    role: str
    generation: int
    step: int
    # the message without the rank
    text: str
    # seconds since this module was imported
    since: float


_began = time.monotonic()


class LogError(ValueError):
    """MPIPS_LOG or MPIPS_LOG_FORMAT has an unknown value."""


def read_variables(environment: Mapping[str, str] = os.environ) -> tuple[str, str, str]:
    """Read the variables of the log. Return (level, folder, format). The level is "" if no log is wanted.

    Raises LogError if a variable has an unknown value.
    """
    level = environment.get(LEVEL_VARIABLE, "").strip().lower()
    form = environment.get(FORMAT_VARIABLE, "").strip().lower() or FORMATS[0]
    folder = environment.get(FOLDER_VARIABLE, "")
    for variable, word, known in ((LEVEL_VARIABLE, level, ("", *LEVELS)), (FORMAT_VARIABLE, form, FORMATS)):
        if word not in known:
            raise LogError(f"{variable}={word!r} is unknown: give {', '.join(filter(None, known))}, or leave it unset")
    return level or ("info" if folder else ""), folder, form


def get(name: str) -> logging.Logger:
    """Return the logger with this name, which must be "mpips" or begin with "mpips."."""
    _configure_once()
    logger = logging.getLogger(name)
    if _stamp not in logger.filters:
        logger.addFilter(_stamp)
    return logger


@cache
def _configure_once() -> None:
    try:
        configure()
    except LogError:
        # The code that reads the options of the job reports this error.
        return


@cache
def begin_rank(size: int) -> None:
    """Log once that this process is one of `size` ranks, and log its end when it exits."""
    logger, pid = get("mpips.rank"), os.getpid()
    logger.info("rank begins, of %d: process %d on %s", size, pid, socket.gethostname())

    def end() -> None:
        # A forked child is not a rank.
        if os.getpid() == pid:
            logger.info("rank ends")

    atexit.register(end)


# the log level that the last call of `configure` has set
_set = [logging.NOTSET]


def configure(environment: Mapping[str, str] = os.environ) -> None:
    """Set up the log as the environment asks. This replaces what an earlier call has set up.

    Raises LogError if a variable has an unknown value.
    """
    level, folder, form = read_variables(environment)
    root = logging.getLogger("mpips")
    for handler in [handler for handler in root.handlers if isinstance(handler, (Terminal, Folder))]:
        root.removeHandler(handler)
    # A level that the program has set stays. Otherwise only warnings are logged unless the environment asks for more: a
    # program that logs at INFO should not find our lines among its own.
    if root.level in (logging.NOTSET, _set[0]):
        _set[0] = getattr(logging, (level or "warning").upper())
        root.setLevel(_set[0])
    if not level:
        return
    formatter = JsonLines() if form == "json" else TextLines()
    terminal = Terminal(logging.WARNING if folder else logging.NOTSET)
    for handler in (terminal, Folder(folder, SUFFIXES[form])) if folder else (terminal,):
        handler.setFormatter(formatter)
        root.addHandler(handler)


def _stamp(record: logging.LogRecord) -> bool:
    """Add to a record the rank that logs it, and the rank's role, generation and step. This filter drops no record."""
    if rank_state.rank < 0:
        rank_state.rank = _rank()
        rank_state.name = rank_state.name or (f"rank {rank_state.rank}" if rank_state.rank >= 0 else "")
    message = record.getMessage()
    vars(record).update(
        rank=rank_state.rank,
        role=rank_state.role,
        generation=rank_state.generation,
        step=rank_state.step,
        text=message,
        since=time.monotonic() - _began,
    )
    if rank_state.name:
        record.msg, record.args = f"{rank_state.name}: {message}", ()
    return True


def _rank() -> int:
    """Return this process' rank in the job, or -1 while MPI does not run. Does not start MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return -1
    return int(module.COMM_WORLD.rank)


def _time(record: logging.LogRecord) -> str:
    """Format the time of a record in UTC, so that lines of several hosts can be sorted."""
    microseconds = int(record.created % 1 * 1e6)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{microseconds:06d}Z"


class TextLines(logging.Formatter):
    """Formats records for people: time, rank, role, generation, step, seconds, logger, and message.

    Further lines of a message are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        record = cast("RankLogRecord", record)
        where = [record.role] if record.role else []
        where += [f"generation {record.generation}"] if record.generation >= 0 else []
        where += [f"step {record.step}"] if record.step >= 0 else []
        inside = f" ({', '.join([*where, f'{record.since:.3f} s'])})"
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        text = record.text if not record.exc_info else f"{record.text}\n{self.formatException(record.exc_info)}"
        lines = text.replace("\n", "\n    ")
        who = rank_state.name or f"process {record.process}"
        return f"{_time(record)} {who}{inside} {record.name}{level}: {lines}"


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on a line of its own.

    The keys are time, level, logger, host, pid, rank, role, generation, step, seconds, message and error. Keys whose
    values are unknown are left out. A process that is not a rank may have "process" in place of "rank".
    """

    def format(self, record: logging.LogRecord) -> str:
        record = cast("RankLogRecord", record)
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "host": socket.gethostname(),
            "pid": record.process,
            **({"rank": record.rank} if record.rank >= 0 else {"process": rank_state.name} if rank_state.name else {}),
            **({"role": record.role} if record.role else {}),
            **({"generation": record.generation} if record.generation >= 0 else {}),
            **({"step": record.step} if record.step >= 0 else {}),
            "seconds": round(record.since, 6),
            "message": record.text,
            **({"error": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return json.dumps(fields, ensure_ascii=False)


class Terminal(logging.StreamHandler[TextIO]):
    """Writes records to standard error, unless handlers that the program itself has configured get the records."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [*logging.getLogger().handlers, *logging.getLogger("mpips").handlers]
        if all(isinstance(handler, (Terminal, Folder)) for handler in handlers):
            self.stream = sys.stderr
            super().emit(record)


class Folder(logging.Handler):
    """Writes records to this process' file in a folder. The folder and the file are made for the first record."""

    def __init__(self, folder: str, suffix: str) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._suffix = suffix
        # descriptor of the open file, and the name of the process for which it was opened
        self._file = -1
        self._name = ""
        # True once a record could not be written; no further record is then written
        self._lost = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record with a single system call. If that fails, report it once, and write no more records."""
        if self._lost:
            return
        try:
            name = rank_state.name.replace(" ", "-") or f"process-{os.getpid()}"
            if self._file < 0 or name != self._name:
                self._open(name)
            os.write(self._file, f"{self.format(record)}\n".encode(errors="replace"))
        except OSError as error:
            self._lost = True
            print(
                f"mpips: {FOLDER_VARIABLE}={self._folder}: the log is not written any more: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def _open(self, name: str) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._folder / f"{name}{self._suffix}", flags, 0o600)
        self._name = name


def folder_of_job(folder: str | os.PathLike[str]) -> str:
    """Return a path within `folder` for the log of the job that this process starts. Each job has a different path."""
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return os.path.join(folder, f"{began}-{socket.gethostname()}-{os.getpid()}")


def merge(folder: str | os.PathLike[str], form: str) -> Path | None:
    """Join the log files of a job's folder into a new file, ordered by time.

    Return the new file, or None if there are no log files. Raises OSError, for example if the new file already exists.
    """
    suffix = SUFFIXES[form]
    target = Path(folder) / f"{MERGED}{suffix}"
    parts = sorted(Path(folder).glob(f"*{suffix}"))
    if not parts:
        return None
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as out:
        for _, text in heapq.merge(*(sorted(_entries(path)) for path in parts), key=lambda entry: entry[0]):
            out.write(text)
    return target


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (time, text) of each record of a file. A line that begins without a time continues the record before it."""
    when, text = "", ""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            time_match = re.search(r'^(?:\{"time": ")?(\d{4}-\d\d-\d\dT[\d:.]+Z)', line)
            if time_match:
                if text:
                    yield when, text
                when, text = time_match.group(1), ""
            text += line if line.endswith("\n") else f"{line}\n"
    if text:
        yield when, text
