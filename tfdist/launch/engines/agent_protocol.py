"""Protocol between a launcher and the agents of its tasks: JSON messages, one a line.

The agent of a task writes its messages to standard output. A scheduler or a remote shell may write
other lines there, so each message begins with a mark. The launcher writes to the agent's standard
input, whose end means that the launcher is gone.
"""

from __future__ import annotations

import json
from typing import Any

MARK = b"\x1e"  # ASCII's record separator
PING_S = 2.0  # interval at which the launcher writes to each agent
# Pings without any message from an agent, after which it counts as lost: its host may be gone
# without an end of the connection, and srun does not notice the death of the step's daemon.
SILENT_PINGS = 15
# Seconds without a message from its launcher after which an agent kills its task: the network may
# be cut without either end of the connection noticing.
ORPHAN_S = 60.0


def encode(message: dict[str, Any]) -> bytes:
    r"""Return the line of a message.

    Example:
        >>> encode({"type": "ping"})
        b'\x1e{"type":"ping"}\n'
    """
    return MARK + json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    r"""Return the message of a line, or None if another program wrote the line.

    Example:
        >>> decode(b'\x1e{"type":"ping"}\n'), decode(b"Warning: motd\n")
        ({'type': 'ping'}, None)
    """
    start = line.find(MARK)
    if start < 0:
        return None
    try:
        message = json.loads(line[start + 1 :])
    except (ValueError, RecursionError):
        return None
    is_message = isinstance(message, dict) and isinstance(message.get("type"), str)
    return message if is_message else None


def text_of(data: bytes) -> str:
    """Return any bytes as text that JSON can hold; `bytes_of` is the inverse."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    r"""Return the bytes of `text_of`.

    Example:
        >>> bytes_of(text_of(b"caf\xc3\xa9 \xff"))
        b'caf\xc3\xa9 \xff'
    """
    return text.encode("utf-8", "surrogateescape")
