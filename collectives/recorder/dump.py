"""Dumps of pages: one rank's page as JSON, or all pages of a job as files for PyTorch's flight recorder analyzer.

A page is the file in which a rank records what it does (`recorder.page`). A failure can be examined even without a
dump, because a page outlives its process. `MPIPS_DUMP_DIR` names a folder into which a rank writes its page as JSON
when a call fails, and on SIGUSR2.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpips.collectives.recorder import page as pages

# the version of PyTorch's file format that this module writes
VERSION = "2.10"
PREFIX = "rank_"
# Our name of an operation -> PyTorch's name. Names that end in "v" allow blocks of different sizes, as our operations
# do.
NAMES = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_v",
    "allgather": "all_gather_v",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "grouped_allreduce": "all_reduce",
}
DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
}
# matches the text of a collective on a page, such as "allreduce of 100 float32"
CALL = re.compile(r"(\w+) of (\d+) (\w+)")
# Matches an array in the text of a call, such as "100 float32". Its groups are the number of elements and the bits of
# an element (empty for bool).
ARRAY = re.compile(r"\b(\d+) (?:bool|[a-z]+(8|16|32|64|128))\b")
GROUPED = re.compile(r"grouped_allreduce of \d+ arrays \(([^)]*)\)")


def bytes_of(text: str) -> int:
    """Return the bytes of the arrays that are named in the text of a call, or 0 if the text names no array."""
    return sum(int(count) * int(bits or 8) // 8 for count, bits in ARRAY.findall(text))


class DumpedCall(NamedTuple):
    """A collective that is recorded on the page of a rank. Times are Unix time in nanoseconds, or 0 if unknown."""

    number: int
    operation: str
    elements: int
    dtype: str
    state: str
    made_ns: int
    begun_ns: int
    ended_ns: int
    thread: int
    line: str


def read_rank(path: Path) -> dict[str, Any] | None:
    """Return the content of a page as values that JSON can hold, or None if the file is not a page.

    The key `lanes` has the call that the rank began last in each communicator and store. The key `records` has the
    timed calls, with times as Unix time in nanoseconds.

    Raises:
        OSError: The file cannot be read.
    """
    content = pages.read(path)
    if content is None:
        return None
    shift = time.time_ns() - time.monotonic_ns()
    records = []
    for record in pages.read_records(path):
        times = {name: at + shift if at else 0 for name, at in record._asdict().items() if name.endswith("_ns")}
        records.append({**record._asdict(), **times, "state": record.state})
    return {
        **content.identity,
        "head": dict(content.head),
        "waits": content.waits,
        "end": dict(content.end),
        "notes": dict(content.notes),
        "lanes": [lane._asdict() for lane in content.lanes],
        "communicators": dict(content.communicators),
        "records": records,
    }


def write_rank(page: Path, folder: Path) -> Path | None:
    """Write a page atomically as `rank-N.json` into a folder. Return that path, or None if `page` is not a page.

    Raises:
        OSError: The page cannot be read, or the folder cannot be written.
    """
    content = read_rank(page)
    return None if content is None else write_json(folder / f"rank-{content.get('rank', page.stem)}.json", content)


def write_json(path: Path, content: object) -> Path:
    """Write a JSON file atomically. Make its folder if necessary.

    Raises:
        OSError: The file cannot be written.
    """
    return _write(path, json.dumps(content, indent=1).encode())


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)
    return path


# ---- PyTorch's format


def write_for_pytorch(ranks: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write files `rank_N` that PyTorch's `torchfrtrace` reads.

    A rank's page has a call if the call was timed, or was the last one of the rank in the communicator. A call is left
    out if it is missing on the page of a rank that has made later calls: the analyzer would conclude that this rank has
    never made the call.

    Args:
        ranks: What `read_rank` has returned for each rank of the job.
        folder: The folder to write to.

    Raises:
        OSError: A file cannot be written.
    """
    calls = {rank["rank"]: _calls(rank) for rank in ranks}
    groups = sorted({group for known in calls.values() for group in known})
    for group in groups:
        members = [member for member in group[0] if member in calls]
        last = {member: max(calls[member].get(group, ()), default=0) for member in members}
        for number in {number for member in members for number in calls[member].get(group, {})}:
            if any(last[member] >= number and number not in calls[member].get(group, {}) for member in members):
                for member in members:
                    calls[member].get(group, {}).pop(number, None)
    return [
        _write(folder / f"{PREFIX}{rank}", pickle.dumps(_as_pytorch(rank, known, groups)))
        for rank, known in calls.items()
    ]


# a communicator, as (its ranks, the number of communicators of the same ranks that were made before it)
Group = tuple[tuple[int, ...], int]


def _calls(rank: Mapping[str, Any]) -> dict[Group, dict[int, DumpedCall]]:
    """Return the collectives on a rank's page, as nested dicts: communicator -> number of the call -> collective."""
    groups: dict[int, Group] = {
        int(identity): (tuple(map(int, record["ranks"].split(","))), record["place"])
        for identity, record in rank["communicators"].items()
    }
    calls: dict[Group, dict[int, DumpedCall]] = {group: {} for group in groups.values()}
    for record in rank["records"]:
        if record["lane"] in groups and record["operation"] in NAMES and record["begun_ns"]:
            calls[groups[record["lane"]]][record["number"]] = DumpedCall(
                record["number"],
                record["operation"],
                record["elements"],
                record["dtype"],
                record["state"],
                record["made_ns"],
                record["begun_ns"],
                record["ended_ns"],
                record["thread"],
                record["line"],
            )
    for lane in rank["lanes"]:
        if lane["identity"] not in groups or lane["number"] in calls[groups[lane["identity"]]]:
            continue
        if grouped := GROUPED.search(lane["text"]):
            nbytes = sum(int(part.split()[0]) for part in grouped[1].split(", "))
            operation, elements, dtype = "grouped_allreduce", nbytes, "uint8"
        elif call := CALL.search(lane["text"]):
            operation, elements, dtype = call[1], int(call[2]), call[3]
        else:
            continue
        waited = next((wait for wait in rank["waits"] if wait["what"] == lane["text"]), None)
        failed = lane["text"] in rank["end"].get("failed", "")
        state, line = "started" if waited or failed else "completed", waited["line"] if waited else ""
        last = DumpedCall(lane["number"], operation, elements, dtype, state, 0, 0, 0, 0, line)
        if operation in NAMES:
            calls[groups[lane["identity"]]][lane["number"]] = last
    return calls


def _as_pytorch(rank: int, calls: Mapping[Group, Mapping[int, DumpedCall]], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the object that PyTorch would pickle for a rank.

    `groups` has all communicators of the job. Its order must be the same for all ranks, because the position of a
    communicator becomes its name.
    """
    own_groups = [group for group in groups if rank in group[0]]
    names = {group: str(groups.index(group)) for group in own_groups}
    config, status = {}, {}
    entries: list[dict[str, Any]] = []
    for group in own_groups:
        known = calls.get(group, {})
        desc = f"mpips {group[1]}"
        config[names[group]] = {"name": names[group], "desc": desc, "ranks": str(list(group[0]))}
        ended = max((number for number, call in known.items() if call.state == "completed"), default=0)
        last = max(known, default=0)
        status[names[group]] = {
            "last_enqueued_collective": last,
            "last_started_collective": last,
            "last_completed_collective": ended,
        }
        entries += [_entry(known[number], names[group], desc, len(group[0])) for number in sorted(known)]
    for number, entry in enumerate(entries):
        entry["record_id"] = entry["op_id"] = number
    return {"version": VERSION, "pg_config": config, "pg_status": status, "entries": entries}


def _entry(call: DumpedCall, name: str, desc: str, size: int) -> dict[str, Any]:
    dtype = DTYPES.get(call.dtype, call.dtype)
    block = call.elements // size
    given = block if call.operation == "allgather" else call.elements
    result = block if call.operation == "reduce_scatter" else call.elements
    at = re.match(r"(.*):(\d+)(?:, (.*))?$", call.line)
    frames = [{"filename": at[1], "line": int(at[2]), "name": at[3] or "<module>"}] if at else []
    return {
        "pg_id": int(name),
        "process_group": (name, desc),
        "collective_seq_id": call.number,
        "p2p_seq_id": 0,
        "profiling_name": f"gloo:{NAMES[call.operation]}",
        "time_created_ns": call.made_ns,
        "input_sizes": [[given]],
        "output_sizes": [[result]],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": call.state,
        "time_discovered_started_ns": call.begun_ns or None,
        "time_discovered_completed_ns": call.ended_ns or None,
        "duration_ms": (call.ended_ns - call.begun_ns) / 1e6 if call.ended_ns else None,
        "retired": call.state == "completed",
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": frames,
        "thread_id": str(call.thread),
        "thread_name": "",
    }
