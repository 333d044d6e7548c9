"""A filter of system calls: those that only widen what hostile code can reach in the kernel fail with EPERM.

Namespaces and missing capabilities already refuse most of them. The filter keeps a bug in their kernel code out of
reach, and closes what namespaces do not cover: kernel keyrings, memory that no limit counts (memfd, System V shared
memory), sockets of other families than Unix and IP (AF_VSOCK reaches the host of a virtual machine), new user
namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from functools import cache

from headwater.sandbox.inside.linux import MACHINE

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_X86_64 = {
    "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69,
    "msgrcv": 70, "msgctl": 71, "ptrace": 101, "syslog": 103, "personality": 135, "modify_ldt": 154, "pivot_root": 155,
    "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212, "semtimedop": 220,
    "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "mq_open": 240, "mq_unlink": 241, "kexec_load": 246,
    "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279,
    "vmsplice": 278, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "vmsplice": 75,
    "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
    "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
    "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187,
    "msgrcv": 188, "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194,
    "shmctl": 195, "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
    "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241,
    "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
    "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
# Since Linux 5.1, new calls have the same number everywhere.
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "set_mempolicy_home_node": 450,
    "open_tree_attr": 467,
}  # fmt: skip
_CALLS = {"x86_64": _X86_64 | _EVERYWHERE, "aarch64": _AARCH64 | _EVERYWHERE}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}
_NEW_NAMESPACES = 0x7E020080
"""The flags of clone() that make a namespace."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6. The network namespace has no interface that is up."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _AUDIT_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_libc = ctypes.PyDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


@cache
def make_filter(machine: str) -> bytes:
    """The filter as a program of the kernel's packet-filter machine."""
    fail, absent = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _AUDIT_AT),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":  # the x32 numbers are a second way to all calls
        lines += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, fail)]
    # clone3 passes its flags in memory, which a filter cannot read. Without it, the C library uses clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, absent)]
    for number in sorted(_CALLS[machine].values()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, fail)]
    lines += [
        (_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, fail),
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines += [(_EQUAL, 0, 3 + len(_FAMILIES), _SOCKET[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    for place, family in enumerate(_FAMILIES):
        lines += [(_EQUAL, len(_FAMILIES) - place, 0, family)]
    lines += [(_RETURN, 0, 0, fail), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def install() -> None:
    """Apply the filter to this process and all that it starts. It needs ``forbid_new_privileges`` first."""
    instructions = make_filter(MACHINE)
    program = _Program(len(instructions) // 8, instructions)
    zero = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program), zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls (seccomp)")
