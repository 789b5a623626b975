"""What a lab needs of this machine, and a sentence for what is missing; ``python -m launch.lab.needs`` prints them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from typing import NoReturn

from launch.lab import kernel

LACKING = 3  # the exit code of what found something missing: 1 is that of a crash
USER_NAMESPACES = (
    "an ordinary user needs user namespaces, and this machine refuses them ({error}): run as root, or let the "
    "administrator set `sysctl user.max_user_namespaces=10000`, on Debian also "
    "`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)
ROOT_NAMESPACES = (
    "root may not make namespaces here ({error}): a container needs the capability SYS_ADMIN "
    "(`docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined`)"
)
MOUNTS = (
    "mounting in a namespace of one's own is refused ({error}): in a container, unmask /proc and /sys "
    "(`docker run --security-opt systempaths=unconfined`)"
)
KERNEL = (
    "this kernel has no {what} ({error}): load the module `{module}` "
    "(on Debian and Ubuntu in the package linux-modules-extra)"
)


def missing() -> list[str]:
    """One sentence for everything that a lab needs and this machine lacks; empty where a lab can be made."""
    if not sys.platform.startswith("linux"):
        return [f"a lab is made of Linux namespaces, and this is {sys.platform}"]
    lacking = _missing_tools()
    if lacking:
        return lacking
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launch.lab.needs"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode not in (0, LACKING):
        return [f"the check of the kernel failed: {done.stderr.strip().splitlines()[-1:]}"]
    return done.stdout.splitlines()


def _missing_tools() -> list[str]:
    tools = [tool for tool in ("nsenter", "setpriv") if shutil.which(tool) is None]
    lacking = [f"the command {tool} is missing: the package util-linux brings it" for tool in tools]
    if importlib.util.find_spec("pyroute2") is None:
        lacking.insert(0, "the Python package pyroute2 is missing: `pip install pyroute2`")
    return lacking


def _missing_in_kernel() -> list[str]:
    """Try everything once, in namespaces that end with this process."""
    user = os.getuid()
    try:
        kernel.new_machine(user, os.getgid())
    except OSError as error:
        return [(USER_NAMESPACES if user != 0 else ROOT_NAMESPACES).format(error=error)]
    child = os.fork()
    if child == 0:
        _try_mounts()
    os.waitpid(child, 0)
    return _missing_links()


def _try_mounts() -> NoReturn:
    """As process 1 of the new namespaces, as the keeper is."""
    try:
        kernel.keep_mounts_private()
        for filesystem, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm")):
            kernel.mount_virtual(filesystem, target)
    except OSError as error:
        print(MOUNTS.format(error=error), flush=True)
    os._exit(0)


def _missing_links() -> list[str]:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    netlink = IPRoute()
    lacking = []
    steps = (
        ("bridges", "bridge", lambda: netlink.link("add", ifname="b", kind="bridge")),
        ("veth pairs", "veth", lambda: netlink.link("add", ifname="v", kind="veth", peer={"ifname": "w"})),
        ("token bucket filter", "sch_tbf", lambda: netlink.tc("add", "tbf", 1, rate=10**6, burst=65536, limit=10**6)),
    )
    for what, module, attempt in steps:
        try:
            attempt()
        except NetlinkError as error:
            lacking.append(KERNEL.format(what=what, module=module, error=error))
    return lacking


if __name__ == "__main__":
    found = _missing_in_kernel()
    print("\n".join(found), end="\n" if found else "")
    raise SystemExit(LACKING if found else 0)
