"""Test where the Ray driver asks for room, with a stand-in for Ray."""

import asyncio
import sys
import types

import pytest

from tfdist.launch.engines import ray_driver


class Group:
    """A placement group on the first node that its selector allows; pending without one."""

    def __init__(self, nodes, bundles, selectors):
        excluded = selectors[0]["ray.io/node-id"] if selectors else "!in()"
        free = [node for node in nodes if node not in excluded[4:-1].split(",")]
        self.table = {
            "state": "CREATED" if free else "PENDING",
            "bundles_to_node_id": dict.fromkeys(range(len(bundles)), free[0] if free else None),
        }


@pytest.fixture
def driver(monkeypatch):
    """Return a function that makes a driver with two tasks on the first of some nodes."""

    def make(*nodes):
        def placement_group(bundles, strategy, name, bundle_label_selector=None):
            return Group(nodes, bundles, bundle_label_selector)

        module = types.ModuleType("ray.util.placement_group")
        module.placement_group = placement_group
        module.placement_group_table = lambda group: group.table
        module.remove_placement_group = removed.append
        for name in ("ray", "ray.util"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "ray.util.placement_group", module)
        monkeypatch.setattr(ray_driver, "AVOID_S", 0.2)
        made = ray_driver.Driver(None, lambda kind, **facts: sent.append(facts["text"]))
        made._options = {"cpus": 1, "gpus": 0, "strategy": "PACK"}
        made._groups = [placement_group([{}, {}], "PACK", "tfdist")]
        made._places = [(0, 0), (0, 1)]
        return made, sent, removed

    sent, removed = [], []
    return make


def avoid(driver, *nodes):
    async def run():
        for node in nodes:
            await driver._avoid(node)

    asyncio.run(run())
    return driver._homes([group.table for group in driver._groups])


def test_tasks_of_a_node_leave_it_once(driver):
    made, sent, _ = driver("a", "b", "c")
    assert avoid(made, "a", "a") == ["b", "b"]  # both tasks there were slow
    assert sent == ["", ""]
    assert avoid(made, "b") == ["c", "c"]


def test_tasks_stay_where_no_other_node_has_room(driver):
    made, sent, removed = driver("a", "b")
    assert avoid(made, "a", "b") == ["b", "b"]
    assert sent == ["", "Ray gave none within 0.2 s"]
    assert len(removed) == 1
