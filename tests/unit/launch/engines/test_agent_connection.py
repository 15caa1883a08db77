"""Test what a launcher makes of an agent that is silent, or that a scheduler has signalled."""

import queue
import time

import pytest

from tfdist.launch.engines import agent_connection
from tfdist.launch.engines.agent_connection import AgentConnection, AgentLost
from tfdist.launch.engines.agent_protocol import decode, encode


class Agent:
    """A transport to an agent that answers pings, or does not."""

    def __init__(self, answers):
        self._answers = answers
        self._lines = queue.Queue()

    def write(self, line):
        if self._answers and decode(line)["type"] == "ping":
            self.say("pong")

    def say(self, kind, **facts):
        self._lines.put(encode({"type": kind, **facts}))

    def read(self):
        return self._lines.get()

    def close(self):
        self._lines.put(b"")

    def ending(self):
        return "ended"


@pytest.fixture
def connect(monkeypatch):
    """Connect to agents with pings in quick succession; close the connections afterwards."""
    monkeypatch.setattr(agent_connection, "PING_S", 0.02)
    made = []

    def connect(transport, **options):
        made.append(AgentConnection("node", transport, **options))
        return made[-1]

    yield connect
    for connection in made:
        connection.close()


def test_silent_agent_counts_as_lost(connect):
    connection = connect(Agent(answers=False))
    with pytest.raises(AgentLost, match="node: sent nothing for"):
        connection.wait_for("hello", time.monotonic() + 30)


def test_agent_that_answers_is_kept(connect):
    connection = connect(Agent(answers=True))
    time.sleep(0.02 * 3 * agent_connection.SILENT_PINGS)
    assert connection.lost is None


def test_signal_of_the_scheduler_is_passed_on(connect):
    numbers = queue.Queue()
    agent = Agent(answers=True)
    connect(agent, signalled=numbers.put)
    agent.say("signalled", number=15)
    assert numbers.get(timeout=30) == 15
