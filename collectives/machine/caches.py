"""The glibc setting that sends long copies past the caches, where glibc takes these for larger than they are.

glibc's memcpy, which NumPy's copies end in, writes around the caches when a copy is longer than 3/4 of the last one:
what lands there will not be found in it anyway, and lines that are only overwritten need not be fetched first. On EPYC
several versions take that cache for the sum of all on the socket, 384 MiB for 32, so that no copy is ever long. In a
virtual machine the kernel does, too: 480 MiB for 2 cores of a Xeon, where copies of more than 32 MiB found nothing in
it and took twice as long as past it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE, THRESHOLD = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"
SYSCONF_LEVEL3 = 194  # _SC_LEVEL3_CACHE_SIZE; Python has no name for it
LARGEST = 32 << 20
"""Bytes of a last cache that one process can count on, as others fill it, too; copies past a larger one lose nothing
worth mention, as was seen on a Xeon of 480 MiB."""
LEVEL3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # as the kernel has it, "32768K"


def long_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable with which a process started from here has copies of 3/4 of the last cache, 24 MiB at most, go past
    it; nothing where glibc does so by itself, is not there, or was told already."""
    try:
        real = int(LEVEL3.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return {}
    return corrected(_believed(), real, environment)


def past_caches(environment: Mapping[str, str]) -> int:
    """Bytes from which on copies of a process that was started with this environment go past the caches;
    `sys.maxsize` where that is not known."""
    for setting in environment.get(VARIABLE, "").split(":"):
        name, _, value = setting.partition("=")
        with contextlib.suppress(ValueError):  # which glibc ignores, too
            if name == THRESHOLD and int(value, 0) > 0:
                return int(value, 0)
    believed = _believed()
    return 3 * believed // 4 if believed > 0 else sys.maxsize


def _believed() -> int:
    """Bytes of the last cache as glibc has it; 0, or less, where it does not know, or is not there."""
    try:
        return os.sysconf(SYSCONF_LEVEL3) if "CS_GNU_LIBC_VERSION" in os.confstr_names else 0
    except (OSError, ValueError):
        return 0


def corrected(believed: int, real: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The same from the cache's bytes as glibc and as the kernel have them."""
    given = environment.get(VARIABLE, "")
    counts = min(real, LARGEST)
    if not 0 < counts < believed or THRESHOLD in given:
        return {}
    return {VARIABLE: ":".join(filter(None, (given, f"{THRESHOLD}={3 * counts // 4:#x}")))}
