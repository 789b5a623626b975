"""The few Linux calls of a lab that Python lacks before 3.12: unshare, setns, mount, names of host and process."""

from __future__ import annotations

import ctypes
import os

NEW_MOUNT = 0x00020000
NEW_UTS = 0x04000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_SAFE = MS_NOSUID | MS_NODEV | MS_NOEXEC
VIRTUAL = {"proc": MS_SAFE, "sysfs": MS_SAFE, "tmpfs": MS_NOSUID | MS_NODEV}
MS_BIND, MS_RECURSIVE, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Give this process new namespaces of the kinds in ``flags`` (a new PID namespace: its later children)."""
    _checked(_libc.unshare(flags), f"unshare(0x{flags:08x})")


def enter(descriptor: int, kind: int) -> None:
    """Move this process into the namespace that ``descriptor`` (an open ``/proc/PID/ns/*``) names."""
    _checked(_libc.setns(descriptor, kind), f"setns(0x{kind:08x})")


def mount(source: str, target: str, filesystem: str, flags: int = 0, data: str = "") -> None:
    """mount(2); raises ``OSError`` naming the target."""
    arguments = (source.encode(), target.encode(), filesystem.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*arguments), f"mount {filesystem or 'bind'} at {target}")


def mount_virtual(filesystem: str, target: str) -> None:
    """Mount a new ``proc``, ``sysfs`` or ``tmpfs``."""
    mount(filesystem, target, filesystem, VIRTUAL[filesystem])


def keep_mounts_private() -> None:
    """Let no mount of this namespace be seen outside it."""
    mount("none", "/", "", MS_RECURSIVE | MS_PRIVATE)


def new_machine(user: int, group: int) -> None:
    """Take new namespaces of all kinds; that of users unless root, that of processes for later children."""
    if user != 0:
        unshare(NEW_USER)
        map_root(user, group)
    unshare(NEW_PID | NEW_NET | NEW_MOUNT | NEW_UTS)


def set_hostname(name: str) -> None:
    """Name this process's UTS namespace."""
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, len(encoded)), f"sethostname {name}")


def set_process_name(name: str) -> None:
    """The name that ``ps -o comm`` shows (15 characters)."""
    _checked(_libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl(PR_SET_NAME)")


def map_root(user: int, group: int) -> None:
    """In a user namespace just made: be root inside, ``user`` and ``group`` outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
