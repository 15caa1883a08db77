"""Test how a launcher ends its agents; tests/engines runs agents on real engines."""

import threading

from tfdist.launch.engines import fleet


class Agent:
    """An agent whose program ends only once all agents are being closed, or never."""

    def __init__(self, together):
        self._together = together
        self.closed = False

    def close(self):
        self._together.wait(30)
        self.closed = True


def test_agents_are_closed_at_the_same_time():
    together = threading.Barrier(3)
    agents = [Agent(together) for _ in range(3)]
    fleet.close_all(agents)  # one after another, the first would wait for the second
    assert all(agent.closed for agent in agents)


def test_agent_that_does_not_end_is_left_after_a_bound(monkeypatch):
    monkeypatch.setattr(fleet, "CLOSE_ALL_S", 0.1)
    never = threading.Event()
    stuck = Agent(never)
    others = [Agent(threading.Barrier(1)) for _ in range(2)]
    fleet.close_all([stuck, *others])
    assert not stuck.closed
    never.set()
