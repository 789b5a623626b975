"""The Linux calls that a lab needs (unshare, setns, mount and others), and a check whether this machine has them.

Python itself has some of these calls only since 3.12. `python -m launch.lab.kernel` tries all calls, and prints a line
for each call that fails. This module must not import NumPy, because NumPy starts threads, and a process with threads
cannot make a user namespace.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

NEW_MOUNT = 0x00020000
NEW_UTS = 0x04000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SAFE = MS_NOSUID | MS_NODEV | MS_NOEXEC
# kind of file system -> the flags to mount it with
VIRTUAL = {"proc": MS_SAFE, "sysfs": MS_SAFE, "tmpfs": MS_NOSUID | MS_NODEV}
MS_BIND = 4096
MS_RECURSIVE = 16384
MS_PRIVATE = 1 << 18
PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Give this process new namespaces of the kinds in `flags`.

    With `NEW_PID`, this process stays in its PID namespace, and its later children are in the new one.
    """
    _checked(_libc.unshare(flags), f"unshare(0x{flags:08x})")


def enter(descriptor: int, kind: int) -> None:
    """Move this process into a namespace. `descriptor` is an open file /proc/PID/ns/*, `kind` one of the NEW_ flags."""
    _checked(_libc.setns(descriptor, kind), f"setns(0x{kind:08x})")


def mount(source: str, target: str, filesystem: str, flags: int = 0, data: str = "") -> None:
    """Call mount(2). Raises OSError with the target in its text."""
    arguments = (source.encode(), target.encode(), filesystem.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*arguments), f"mount {filesystem or 'bind'} at {target}")


def mount_virtual(filesystem: str, target: str) -> None:
    """Mount a new proc, sysfs or tmpfs."""
    mount(filesystem, target, filesystem, VIRTUAL[filesystem])


def keep_mounts_private() -> None:
    """Keep later mounts in this namespace from appearing in other namespaces."""
    mount("none", "/", "", MS_RECURSIVE | MS_PRIVATE)


def new_machine(user: int, group: int) -> None:
    """Give this process new network, mount and UTS namespaces, and its later children a new PID namespace.

    Unless `user` is root, the process first gets a user namespace. Inside this namespace the process is root. Seen from
    outside, the process still belongs to `user` and `group`.
    """
    if user != 0:
        unshare(NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    unshare(NEW_PID | NEW_NET | NEW_MOUNT | NEW_UTS)


def set_hostname(name: str) -> None:
    """Set the host name in this process's UTS namespace."""
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, len(encoded)), f"sethostname {name}")


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` shows. Only the first 15 characters count."""
    _checked(_libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl(PR_SET_NAME)")


# The exit code of `python -m launch.lab.kernel` if something is missing. It is not 1, because a Python program that
# crashes exits with 1.
MISSING = 3
USER_NAMESPACES = (
    "an ordinary user needs user namespaces, and this machine refuses them ({error}): run as root, or let the "
    "administrator set `sysctl user.max_user_namespaces=10000`, on Debian also "
    "`sysctl unprivileged_userns_clone=1`, on Ubuntu `sysctl apparmor_restrict_unprivileged_userns=0`"
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


def find_missing() -> list[str]:
    """Return an error message for each thing that a lab needs and this machine lacks. Empty if a lab can be made.

    Tries the kernel's calls in a child process, and blocks until the child has ended.
    """
    if not sys.platform.startswith("linux"):
        return [f"a lab is made of Linux namespaces, and this is {sys.platform}"]
    tools = [tool for tool in ("nsenter", "setpriv") if shutil.which(tool) is None]
    missing = [f"the command {tool} is missing: the package util-linux brings it" for tool in tools]
    if importlib.util.find_spec("pyroute2") is None:
        missing.insert(0, "the Python package pyroute2 is missing: `pip install pyroute2`")
    if missing:
        return missing
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mpips.launch.lab.kernel"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode not in (0, MISSING):
        return [f"the check of the kernel failed: {done.stderr.strip().splitlines()[-1:]}"]
    return done.stdout.splitlines()


def _try_kernel() -> list[str]:
    """Try each kernel call once, in namespaces that end with this process. Return a message for each failed call.

    The mounts are tried in a child process. If a mount fails, the child itself prints the message.
    """
    user = os.getuid()
    try:
        new_machine(user, os.getgid())
    except OSError as error:
        return [(USER_NAMESPACES if user != 0 else ROOT_NAMESPACES).format(error=error)]
    child = os.fork()
    if child == 0:
        _try_mounts()
    os.waitpid(child, 0)
    return _try_links()


def _try_mounts() -> NoReturn:
    """Try the mounts in this process, which is process 1 of the new PID namespace, as a keeper is. Then exit."""
    try:
        keep_mounts_private()
        for filesystem, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm")):
            mount_virtual(filesystem, target)
    except OSError as error:
        print(MOUNTS.format(error=error), flush=True)
    os._exit(0)


def _try_links() -> list[str]:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    netlink = IPRoute()
    missing = []
    steps = (
        ("bridges", "bridge", lambda: netlink.link("add", ifname="b", kind="bridge")),
        ("veth pairs", "veth", lambda: netlink.link("add", ifname="v", kind="veth", peer={"ifname": "w"})),
        ("token bucket filter", "sch_tbf", lambda: netlink.tc("add", "tbf", 1, rate=10**6, burst=65536, limit=10**6)),
    )
    for what, module, attempt in steps:
        try:
            attempt()
        except NetlinkError as error:
            missing.append(KERNEL.format(what=what, module=module, error=error))
    return missing


NETSTAT = "TcpExt:"
GIVEN_UP = "TCPAbortOnTimeout"


def is_unplugged(port: str, links: Path = Path("/sys/class/net")) -> bool:
    """True if a switch port passes no frames: the port is down, or the NIC at the other end of its cable is."""
    try:
        return (links / port / "carrier").read_text().strip() != "1"
    except OSError:
        # If the port itself is down, the file `carrier` cannot be read.
        return True


def count_given_up(process: int, processes: Path = Path("/proc")) -> int:
    """Return how many TCP connections in the network namespace of `process` were closed for lack of an answer.

    Returns 0 if the process has ended.
    """
    try:
        text = (processes / str(process) / "net" / "netstat").read_text()
    except OSError:
        return 0
    names, values = (line.split() for line in text.splitlines() if line.startswith(NETSTAT))
    return int(values[names.index(GIVEN_UP)])


def is_alive(process: int) -> bool:
    """True if `process`, the process that holds a host's namespaces, has not ended."""
    return Path(f"/proc/{process}/ns/net").exists()


if __name__ == "__main__":
    failures = _try_kernel()
    print("\n".join(failures), end="\n" if failures else "")
    raise SystemExit(MISSING if failures else 0)
