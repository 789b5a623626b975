"""What a lab needs of this machine, and a sentence for what is missing; ``python -m launch.lab.needs`` prints them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

from launch.lab import kernel

USER_NAMESPACES = (
    "an ordinary user needs user namespaces, and this machine refuses them ({error}): run as root, or let the "
    "administrator set `sysctl user.max_user_namespaces=10000`, on Debian also "
    "`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)
ROOT_NAMESPACES = (
    "root may not make namespaces here ({error}): a container needs the capability SYS_ADMIN "
    "(`docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined`)"
)
LACKING = 3  # the exit code of what found something missing: 1 is that of a crash
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
        [sys.executable, "-m", "launch.lab.needs"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode not in (0, LACKING):
        return [f"the check of the kernel failed: {done.stderr.strip().splitlines()[-1:]}"]
    return done.stdout.splitlines()


def _missing_tools() -> list[str]:
    lacking = []
    if importlib.util.find_spec("pyroute2") is None:
        lacking.append("the Python package pyroute2 is missing: `pip install pyroute2`")
    for tool in ("nsenter", "setpriv"):
        if shutil.which(tool) is None:
            lacking.append(f"the command {tool} is missing: the package util-linux brings it")
    return lacking


def _missing_in_kernel() -> list[str]:
    """Try everything once, in namespaces that end with this process."""
    user, group = os.getuid(), os.getgid()
    try:
        if user != 0:
            kernel.unshare(kernel.NEW_USER)
            kernel.map_root(user, group)
        kernel.unshare(kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_MOUNT | kernel.NEW_UTS)
    except OSError as error:
        return [(USER_NAMESPACES if user != 0 else ROOT_NAMESPACES).format(error=error)]
    return _missing_mounts() + _missing_links()


def _missing_mounts() -> list[str]:
    child = os.fork()
    if child == 0:
        try:
            kernel.mount("none", "/", "", kernel.MS_RECURSIVE | kernel.MS_PRIVATE)
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
            kernel.mount("sysfs", "/sys", "sysfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
            kernel.mount("tmpfs", "/dev/shm", "tmpfs")
        except OSError as error:
            print(
                f"mounting in a namespace of one's own is refused ({error}): in a container, unmask /proc and /sys "
                "(`docker run --security-opt systempaths=unconfined`)",
                flush=True,
            )
        os._exit(0)
    os.waitpid(child, 0)
    return []


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
