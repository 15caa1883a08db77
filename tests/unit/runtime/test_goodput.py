"""Test goodput: each second of a job is in one category, for sound and for damaged journals."""

import json
import os
import random

import pytest

from tfdist.runtime.goodput import CATEGORIES, LOSSES, REMEDIES, measure, so_far, with_open_attempt
from tfdist.runtime.launch_protocol import Phase, Progress, check_event, note, read_journal
from tfdist.runtime.time_account import RECORDED, Account, TimeAccount


def account(steps=0, base=0, reached=0, phase="running", silent=0.0, **seconds):
    facts = {"steps": steps, "base": base, "reached": reached, "phase": phase, "silent": silent}
    return {**dict.fromkeys(RECORDED, 0.0), **seconds, **facts}


def journal(*events, first=100.0, boot=None):
    """Return the lines of events at their seconds after `first`."""
    own = {} if boot is None else {"boot": boot}
    return [
        check_event({"time": first + at, "event": event, **facts, **own})
        for at, event, facts in events
    ]


def attempt(number, begin, end, *accounts, detected=None, codes=None):
    tasks = [f"worker:{rank}" for rank in range(max(1, len(accounts)))]
    facts = {"attempt": number, "codes": codes or {}}
    if accounts:
        facts["accounts"] = dict(zip(tasks, accounts, strict=False))
    return [
        (begin, "attempt", {"attempt": number, "tasks": tasks}),
        *([] if detected is None else [(detected, "detected", {"task": "worker:0"})]),
        (end, "ended", facts),
    ]


FAILED = account(
    steps=40,
    base=0,
    reached=40,
    silent=3.0,  # one second of it is the end of the tasks
    training=30.0,
    input=10.0,
    compile=4.0,
    save=1.0,
    idle=2.0,
)
WENT_ON = account(
    steps=50, base=30, reached=80, phase="idle", silent=1.0, training=25.0, restore=2.0, sync=3.0
)
EVENTS = [
    (0, "launch", {"chaos": None}),
    (5, "allocated", {"seconds": 4.0}),
    *attempt(0, 6, 66, FAILED, detected=65),
    (66, "decided", {"restart": True, "text": ""}),
    *attempt(1, 68, 118, WENT_ON),
    (120, "over", {"code": 0}),
]


def test_each_second_has_one_category():
    goodput = measure([journal(*EVENTS)])
    assert goodput.wall == pytest.approx(120)
    assert {name: s for name, s in goodput.seconds.items() if s} == pytest.approx(
        {
            "queue": 4.0,
            "startup": 2.0 + 10.0,  # before the attempt, and 60 - 47 - 2 - 1 s of it
            "training": 22.5 + 25.0,  # 10 of 40 steps were lost
            "input": 7.5,
            "lost": 10.0,
            "compile": 4.0,
            "save": 1.0,
            "restore": 2.0,
            "sync": 3.0,
            "detection": 2.0,
            "restart": 1.0 + 2.0 + 19.0,  # the end of the tasks, the pause, the new start
            "idle": 2.0 + 1.0 + 2.0,
        }
    )
    assert (goodput.attempts, goodput.launches, goodput.lost_steps) == (2, 1, 10)
    assert goodput.share == pytest.approx(47.5 / 120)
    assert [name for name, _ in goodput.losses] == ["restart", "startup", "lost"]
    assert goodput.line() == (
        "goodput 39.6 % of 2 min 0 s; largest losses: restart 22 s (18.3 %), startup 12 s "
        "(10.0 %), lost 10 s (8.3 %)"
    )
    assert goodput.markdown().splitlines() == [
        "Goodput 39.6 % of 2 min 0 s",
        "",
        "| largest losses | time | share | remedy |",
        "|---|--:|--:|---|",
        f"| restart | 22 s | 18.3 % | {REMEDIES['restart']} |",
        f"| startup | 12 s | 10.0 % | {REMEDIES['startup']} |",
        f"| lost | 10 s | 8.3 % | {REMEDIES['lost']} |",
    ]
    assert not goodput.problems


def test_preempted_tasks_end_for_a_restart():
    ends = account(steps=5, reached=5, phase="idle", silent=2.0, training=5.0)
    events = [
        *attempt(0, 0, 10, ends, detected=9.5, codes={"worker:0": 42}),
        *attempt(1, 10, 20, account(steps=5, base=5, reached=10, phase="idle", silent=3.0)),
    ]
    goodput = measure([journal(*events)])
    assert goodput.seconds["restart"] == pytest.approx(2.0 + 7.0)
    assert goodput.seconds["startup"] == pytest.approx(3.0)
    assert goodput.seconds["idle"] == pytest.approx(3.0)


def test_several_workers_count_by_their_mean():
    fast = account(steps=10, reached=10, phase="idle", training=4.0, sync=4.0)
    slow = account(steps=10, reached=10, phase="idle", training=7.0, input=1.0)
    goodput = measure([journal(*attempt(0, 0, 10, fast, slow))])
    assert goodput.tasks == 2
    assert goodput.seconds["training"] == pytest.approx(5.5)
    assert (goodput.seconds["sync"], goodput.seconds["input"]) == pytest.approx((2.0, 0.5))
    assert goodput.wall == pytest.approx(10)


def test_steps_that_are_lost_twice_count_once_each():
    """The second attempt restores step 6, the third step 3, as the newest snapshot is damaged."""
    events = [
        *attempt(0, 0, 10, account(steps=10, base=0, reached=10, training=10.0), detected=10),
        *attempt(1, 10, 12, account(steps=2, base=6, reached=8, training=2.0), detected=12),
        *attempt(2, 12, 13, account(training=1.0), detected=13),  # made no step
        *attempt(3, 13, 20, account(steps=7, base=3, reached=10, phase="idle", training=7.0)),
    ]
    goodput = measure([journal(*events)])
    assert goodput.lost_steps == 7 + 2
    assert goodput.seconds["lost"] == pytest.approx(9.0)
    assert goodput.seconds["training"] == pytest.approx(3.0 + 1.0 + 7.0)


def test_launches_of_one_job_and_the_time_between_them():
    first = journal(*attempt(0, 0, 10, account(steps=10, reached=10, training=10.0)))
    second = journal(
        *attempt(0, 0, 5, account(steps=5, base=8, reached=13, training=5.0)), first=130.0
    )
    goodput = measure([second, first])  # in any order
    assert goodput.launches == 2
    assert goodput.seconds["idle"] == pytest.approx(20)
    assert goodput.lost_steps == 2
    assert goodput.wall == pytest.approx(35)


def test_a_clock_that_is_set_moves_no_second():
    lines = journal(*EVENTS)
    for line in lines:
        line["clock"] = line["time"]
    whole = measure([lines])
    for line in lines[5:]:
        line["time"] += 365 * 86400.0
    assert measure([lines]) == whole
    # An older journal has only the clock that can be set.
    for line in lines:
        del line["clock"]
        line["time"] -= 0.0 if line["time"] < 1e6 else 2 * 365 * 86400.0
    goodput = measure([lines])
    assert all(seconds >= 0 for seconds in goodput.seconds.values())
    assert "go back in time" in goodput.problems[0]


def test_hosts_that_share_a_journal():
    """Their clocks differ; both end the same attempt."""
    here = journal(*attempt(0, 0, 10, account(steps=5, reached=5, training=8.0)), boot="a")
    there = journal(*attempt(0, 0, 10, account(steps=5, reached=5, training=6.0)), boot="b")
    for line in there:
        line["time"] += 1000.0
        if "accounts" in line:
            line["accounts"] = {"worker:1": line["accounts"]["worker:0"]}
    goodput = measure([[*here, *there]])
    assert goodput.tasks == 2
    assert goodput.seconds["training"] == pytest.approx(7.0)
    assert goodput.wall == pytest.approx(10)


def test_attempts_without_accounts_are_named():
    goodput = measure([journal(*attempt(0, 0, 10), *attempt(1, 12, 20))])
    assert goodput.tasks == 0
    assert goodput.seconds["idle"] == pytest.approx(18)
    assert goodput.unmeasured == pytest.approx(18)
    assert goodput.problems[0].startswith("2 of 2 attempts have no time accounts")


def test_attempt_that_fails_before_it_trains_is_part_of_a_restart():
    killed = attempt(1, 12, 20, detected=19)
    trained = account(steps=5, reached=5, training=8.0)
    lines = journal(*attempt(0, 0, 10, trained), *killed, *attempt(2, 21, 30, trained))
    goodput = measure([lines])
    assert goodput.problems == ()
    assert goodput.unmeasured == 0
    assert goodput.seconds["restart"] >= 2 + 8 + 1
    assert goodput.wall == pytest.approx(30)
    stepped = [*killed[:1], (15, "stepping", {"attempt": 1, "step": 1, "total": 6}), *killed[1:]]
    lines = journal(*attempt(0, 0, 10, trained), *stepped, *attempt(2, 21, 30, trained))
    assert "1 of 3 attempts have no time accounts" in measure([lines]).problems[0]


@pytest.mark.parametrize("journals", [[], [[]], [journal((0, "launch", {"chaos": None}))]])
def test_no_attempt(journals):
    goodput = measure(journals)
    assert (goodput.wall, goodput.share, goodput.attempts, goodput.losses) == (0, 0, 0, [])


@pytest.mark.parametrize("seed", range(100))
def test_categories_add_up_for_any_journal(seed):
    """Events are dropped, doubled and swapped, and accounts claim more time than there is."""
    rng = random.Random(seed)
    events = []
    at = 0.0
    for number in range(rng.randint(1, 5)):
        begin = at + rng.random()
        end = begin + rng.choice((0.0, 1.0, 50.0))
        facts = [
            account(
                steps=rng.randint(0, 20),
                base=rng.randint(0, 20),
                reached=rng.randint(0, 40),
                phase=rng.choice(("idle", "tracing", "running", "?")),
                silent=rng.choice((0.0, 1.0, 1e9)),
                **{name: rng.choice((0.0, 0.5, 20.0, 1e9)) for name in RECORDED},
            )
            for _ in range(rng.randint(0, 3))
        ]
        detected = rng.choice((None, end, begin + (end - begin) / 2))
        events += attempt(number, begin, end, *facts, detected=detected)
        events.append((end, "allocated", {"seconds": rng.choice((0.0, 0.5, 1e9))}))
        at = end
    lines = journal(*events)
    intact = measure([lines])
    assert intact.wall == pytest.approx(lines[-1]["time"] - lines[0]["time"])
    for _ in range(rng.randint(0, 3)):
        index = rng.randrange(len(lines))
        if rng.random() < 0.5:
            lines.insert(rng.randrange(len(lines)), lines[index])
        else:
            lines[index] = {
                **lines[index],
                rng.choice(("accounts", "seconds", "time", "clock", "tasks")): rng.choice(
                    (1.0, 0.0, 1e12)
                ),
            }
    lines = [line for line in lines if rng.random() < 0.9 and _sound(line)]
    goodput = measure([lines])
    assert set(goodput.seconds) == set(CATEGORIES)
    assert all(seconds >= 0 for seconds in goodput.seconds.values()), goodput
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall)
    assert 0 <= goodput.share <= 1
    json.dumps(goodput.to_json(), allow_nan=False)


def _sound(line):
    try:
        check_event(line)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "damage",
    [
        5,
        [],
        {},
        {**FAILED, "training": "many"},
        {**FAILED, "training": -1.0},
        {**FAILED, "training": float("nan")},
        {**FAILED, "silent": float("nan")},
        {**FAILED, "reached": None},
        {**FAILED, "phase": []},
        {name: value for name, value in FAILED.items() if name != "steps"},
    ],
)
def test_damaged_account_is_left_out(damage):
    lines = journal(*attempt(0, 0, 10, WENT_ON))
    lines[-1]["accounts"]["worker:1"] = damage
    assert measure([lines]) == measure([journal(*attempt(0, 0, 10, WENT_ON))])


def test_open_attempt_ends_with_the_last_sign_of_life(tmp_path):
    """The launcher was killed, or it still runs."""
    directory = tmp_path / "attempt-1"
    directory.mkdir()
    own = TimeAccount()
    own.add_steps(3)
    for task in ("worker-0", "worker-1"):
        Progress(str(directory / f"{task}.progress"), own).beat(Phase.RUNNING, 0, 3, 3)
    now = 1_000_000.0
    os.utime(directory / "worker-0.progress", (now + 20, now + 20))
    os.utime(directory / "worker-1.progress", (now + 16, now + 16))
    (directory / "worker-2.progress").write_text("running 0 0")
    tasks = ["worker:0", "worker:1", "worker:2"]
    lines = journal(
        (0, "launch", {"chaos": None}), (10, "attempt", {"attempt": 1, "tasks": tasks}), first=now
    )
    whole = with_open_attempt(lines, str(tmp_path))
    assert whole[:-1] == lines
    ended = whole[-1]
    assert (ended["time"], ended["attempt"]) == (now + 20, 1)
    assert set(ended["accounts"]) == {"worker:0", "worker:1"}
    assert [fact["silent"] for fact in ended["accounts"].values()] == [0.0, 4.0]
    assert measure([whole]).wall == pytest.approx(20)
    assert with_open_attempt(whole, str(tmp_path)) == whole
    assert with_open_attempt([], str(tmp_path)) == []


def test_process_sees_the_whole_job(tmp_path):
    own = Account({**dict.fromkeys(RECORDED, 0.0), "startup": 3.0, "training": 6.0}, 5, 20, 25)
    alone = so_far([], 0, own)
    assert alone.share == pytest.approx(6 / 9, abs=0.01)
    note(str(tmp_path), "launch", chaos=None)
    note(str(tmp_path), "attempt", attempt=0, tasks=["worker:0"])
    note(str(tmp_path), "detected", task="worker:0")
    note(str(tmp_path), "ended", attempt=0, codes={}, accounts={"worker:0": FAILED})
    note(str(tmp_path), "attempt", attempt=1, tasks=["worker:0"])
    lines = read_journal(str(tmp_path))
    for line in lines[:3]:
        line["clock"] -= 60.0
    for line in lines:
        line["clock"] -= 12.0
    goodput = so_far(lines, 1, own)
    assert goodput.attempts == 2
    assert goodput.lost_steps == 20
    assert goodput.wall == pytest.approx(72, abs=1)
    assert goodput.seconds["training"] == pytest.approx(15 + 6, abs=0.1)


def test_account_survives_the_heartbeat_file(tmp_path):
    now = 0.0
    own = TimeAccount(lambda: now)
    now = 3.0
    with own.running("training"):  # ends the startup
        now = 5.0
        with own.during("save"):
            now = 5.5
        now = 6.5
    own.move("training", "input", 1.0)
    own.move("training", "sync", 9.0)  # no more than there is
    now = 7.0
    state = own.state()
    assert {name: s for name, s in state.seconds.items() if s} == {
        "startup": 3.0,
        "input": 1.0,
        "sync": 2.0,
        "save": 0.5,
        "idle": 0.5,
    }
    assert sum(state.seconds.values()) == 7.0


def test_every_loss_has_a_remedy():
    assert set(REMEDIES) == set(CATEGORIES) - {"training"}
    assert LOSSES == 3
