"""Protocol of the snapshot server, which holds the newest snapshots of a launch in memory.

A training process writes a snapshot into shared memory that has no name (`memfd_create`), and sends
its file descriptor over a Unix socket. The server keeps the descriptor of the newest complete
snapshot of each directory, so that the memory outlives the training process. The kernel frees the
memory once no process has the descriptor, however the processes end: nothing is left in /dev/shm.

The server and its clients exchange JSON objects, one a packet. They accept only processes of the
same user.

    {"put": RUN, "attempt": N, "part": I, "parts": K, "at": [EPOCH, STEP], "size": BYTES,
        "seconds": BOUND}, with a descriptor; answered when all parts of the snapshot are there:
        {"complete": AT, "uncopied": REASON}, or {"failed": REASON}, or {"superseded": ATTEMPT}
    {"get": RUN, "part": I, "attempt": N}; answered with a descriptor and
        {"position": [ATTEMPT, EPOCH, STEP], "parts": K, "size": BYTES}, or by {}
    {"drop": RUN}; answered by {}

`tfdist.launch.snapshot_process` is the server.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

PACKET_BYTES = 1 << 16
MESSAGE_S = 10.0  # for an answer that needs no other process
GET_S = 240.0  # for a snapshot that another host holds
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def is_supported() -> bool:
    """Return whether this system has shared memory without a name, and sockets without a file."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def address_of(name: str) -> str:
    """Return the address of a server's socket, which is not in the file system."""
    return f"\0{name}"


def is_own(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end of a Unix socket."""
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(facts)[1] == os.getuid()
