"""Network isolation: moves this process and its tasks into a private network namespace.

TensorFlow's servers listen on all interfaces, without authentication, whatever address the cluster
gives them. A new network namespace of Linux has one interface, its own loopback, and child
processes inherit it. No other host can reach it. The file permissions of the process stay the same.
https://man7.org/linux/man-pages/man7/network_namespaces.7.html
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from os import _exit

CLONE_NEWUSER = 0x10000000  # linux/sched.h
CLONE_NEWNET = 0x40000000  # linux/sched.h
_SIOCGIFFLAGS = 0x8913  # linux/sockios.h
_SIOCSIFFLAGS = 0x8914  # linux/sockios.h
_IFF_UP = 1  # linux/if.h
_IFREQ = "16sH22x"  # struct ifreq: interface name and flags

Unshare = Callable[[int], None]  # the signature of os.unshare in Python 3.12

_WARNING = """\
WARNING: other hosts may reach these tasks.
  TensorFlow's servers listen on all network interfaces, without authentication: whoever reaches a \
task's port can run
  code in it. A private network would have closed the ports, but was refused:
    {refusal}
  remedy: close this host's ports to others with a firewall. Where its network is \
private, --allow-remote ends this
  warning."""


def isolate(unshare: Unshare | None = None, platform: str = sys.platform) -> str | None:
    """Move this process and all its future children to a private network.

    Existing children stay in the old network. Other programs of this host are unreachable, too.

    Args:
        unshare: Function that leaves the namespaces of these flags for new ones, default
            `os.unshare` or the function of libc.
        platform: Platform, default `sys.platform`.

    Returns:
        None on success; else the refused step and its reason, and then nothing has changed.

    Example:
        >>> def refuse(flags):
        ...     raise PermissionError(1, "Operation not permitted")
        >>> isolate(refuse, "linux")  # doctest: +ELLIPSIS
        'unshare(...CLONE_NEWNET): Operation not permitted'
    """
    if platform != "linux":
        return f"only Linux has network namespaces, this is {platform}"
    # A user namespace lets an ordinary user create a network namespace and keep the same rights.
    # Root would lose its rights over the files of others in a user namespace, so it creates the
    # network namespace directly or not at all.
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET
    refusal = _try_in_child(lambda: enter(flags, unshare or _unshare))
    if refusal is not None:
        return refusal
    if len(os.listdir("/proc/self/task")) > 1:
        return "this process has several threads, of which only one would move"
    enter(flags, unshare or _unshare)
    return None


def enter(flags: int, unshare: Unshare) -> None:
    """Leave the namespaces of `flags` for new ones and make the new ones usable.

    Args:
        flags: CLONE_NEWNET, alone or with CLONE_NEWUSER.
        unshare: See `isolate`.

    Raises:
        OSError: If a step was refused. Its `filename` names the step. Earlier steps may have taken
            effect.
    """
    user = os.geteuid()
    group = os.getegid()
    with _step(
        "unshare(CLONE_NEWUSER | CLONE_NEWNET)"
        if flags & CLONE_NEWUSER
        else "unshare(CLONE_NEWNET)"
    ):
        unshare(flags)
    if flags & CLONE_NEWUSER:
        # Map each id to itself. Linux requires that setgroups is denied before an ordinary user
        # maps a group.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with (
                _step(f"write /proc/self/{name}"),
                open(f"/proc/self/{name}", "wb", buffering=0) as file,
            ):
                file.write(text.encode())
    with _step("ioctl(SIOCSIFFLAGS), to bring the loopback interface up"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack(_IFREQ, b"lo", 0))
            name, state = struct.unpack(_IFREQ, answer)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack(_IFREQ, name, state | _IFF_UP))
    with _step("connect to 127.0.0.1"), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def _try_in_child(act: Callable[[], None]) -> str | None:
    """Run `act` in a child process and return why it fails, or None.

    The child exits afterwards: a process that is half-way inside a namespace cannot go back.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except OSError as error:
            os.write(writing, f"{error.filename}: {error.strerror or error}".encode())
        finally:
            _exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        problem = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # A sandbox may react to a system call with a signal.
    return None if code == 0 else problem or f"a child that tried it ended with code {code}"


def _unshare(flags: int) -> None:
    if hasattr(os, "unshare"):  # Python 3.12
        os.unshare(flags)
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), name) from error


def warning(refusal: str, colour: bool = False) -> str:
    """Return the warning for the user after isolation was refused.

    Args:
        refusal: Reason, as `isolate` returns it.
        colour: Whether the headline may be red, default False.

    Returns:
        Several lines, without a newline at the end.
    """
    headline, rule, rest = _WARNING.partition("\n")
    if colour:
        headline = f"\x1b[1;31m{headline}\x1b[0m"
    return headline + rule + rest.format(refusal=refusal)
