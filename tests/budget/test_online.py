"""The goodput rule on rounds of an engine: what is timed, what is expected, what is chosen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bole_runtime.budget import goodput_nodes
from bole_runtime.budget.online import AcceptanceByNodes, OnlineBudget
from bole_runtime.budget.round_times import RoundClock, RoundTimes
from bole_runtime.budget.table import CalibrationTable, Timing, load_calibration

DATA = Path(__file__).resolve().parents[2] / "docs" / "data"
NODES = (8, 16, 32)
DEPTHS = (5, 5, 5)


def test_a_clock_counts_rounds_between_rounds_like_them() -> None:
    clock, now, counted = RoundClock(), 0.0, []
    # One step ahead: a distance may be that of the round before.
    for batch, nodes in [(4, 8)] * 5 + [(4, 16)] * 4 + [(2, 16)] * 3 + [(4, 16)]:
        now += nodes / 1000
        counted.append(clock.start(batch, nodes, now))
    assert [n for n, c in enumerate(counted) if c is not None] == [3, 4, 8]
    assert counted[4] == pytest.approx(0.008)
    assert counted[8] == pytest.approx(0.016)
    for _ in range(4):
        clock.start(4, 16, now)
    clock.interrupt()
    assert clock.start(4, 16, now + 1) is None


def test_times_are_medians_and_bounds() -> None:
    times = RoundTimes()
    assert times.cost(4, 16) == (0.0, False)
    for us in (10.0, 11.0, 900.0):
        times.observe(4, 16, us)
    assert times.cost(4, 16) == (11.0, True)
    assert times.cost(4, 32) == (11.0, False)  # no less than a smaller one
    assert times.cost(4, 8) == (0.0, False)
    assert times.cost(8, 16) == (0.0, False)  # another batch
    for _ in range(600):  # what was not measured for long may have changed
        times.observe(4, 8, 9.0)
    assert times.cost(4, 16).us == pytest.approx(9.9)
    assert times.cost(4, 8).us == 9.0


def test_an_estimate_of_the_forward_is_shifted_by_the_rest_of_a_round() -> None:
    forward = {8: 5.0, 16: 6.0, 32: 9.0}
    times = RoundTimes(lambda batch, nodes: forward.get(nodes))
    assert times.cost(4, 32) == (9.0, False)
    for _ in range(3):
        times.observe(4, 16, 8.0)
    assert times.cost(4, 32) == (11.0, False)
    assert times.cost(4, 8) == (7.0, False)
    assert times.cost(4, 64) == (8.0, False)  # not calibrated that far


def test_times_of_other_batches_are_scaled() -> None:
    times = RoundTimes()
    assert times.borrowed(4, 8) is None
    for us in (10.0, 12.0):
        times.observe(8, 8, us)
        times.observe(64, 8, 1000.0)
    assert times.borrowed(4, 8) == 11.0
    times.observe(8, 32, 20.0)
    times.observe(4, 32, 10.0)
    assert times.borrowed(4, 8) == 5.5


def test_expected_drafts_follow_the_drafter_where_nothing_was_tried() -> None:
    model = AcceptanceByNodes(NODES, DEPTHS)
    assert model.expected() == {8: 0.0, 16: 0.0, 32: 0.0}
    for _ in range(40):
        model.observe(16, 1.0, (1.5, 2.0, 3.0))  # half of what the drafter says
    made = model.expected()
    assert made[16] == pytest.approx(1.0)
    assert made[8] == pytest.approx(1.0)  # the most it can, so that it is tried
    assert made[32] == pytest.approx(1.5)
    for _ in range(40):
        model.observe(32, 1.2, (1.5, 2.0, 3.0))
    model.observe(8, 0.6, (1.5, 2.0, 3.0))
    made = model.expected()
    assert made[32] == pytest.approx(1.2)
    assert made[16] == pytest.approx(1.0)
    assert made[8] == pytest.approx(0.6)
    for _ in range(20):  # the drafter is surer
        model.observe(32, 1.6, (3.0, 3.5, 4.0))
    assert model.expected()[8] == pytest.approx(1.2, rel=0.01)


def test_a_drafter_that_says_almost_nothing_is_scaled() -> None:
    model = AcceptanceByNodes(NODES, DEPTHS)
    for _ in range(10):
        model.observe(32, 4.0, (1e-5, 2e-5, 2.1e-5))
        model.observe(8, 2.0, (1e-5, 2e-5, 2.1e-5))
    assert [round(n, 6) for n in model.expected().values()] == [2.0, 4.0, 4.0]
    for bad in (float("nan"), 0.0, -1.0):
        model.observe(32, 4.0, (bad,) * 3)
    assert model.expected()[32] == pytest.approx(4.0)


def test_larger_trees_get_no_fewer_and_none_more_than_its_depth() -> None:
    model = AcceptanceByNodes(NODES, (3, 4, 5))
    model.observe(8, 2.0, (1.0, 9.0, 9.0))
    assert list(model.expected().values()) == [2.0, 4.0, 5.0]  # shallower drafting said nothing of deeper trees
    model.observe(32, 1.9, (1.0, 4.0, 9.0))
    made = model.expected()
    assert made[8] <= made[16] <= made[32] <= 5.0
    with pytest.raises(ValueError, match="no ascending pairs"):
        AcceptanceByNodes((8, 8), (1, 1))


def simulate(budget: OnlineBudget, batch: int, rounds: int, us: dict[int, float], accepted: dict[int, float]) -> int:
    """Run rounds; return the nodes of the most of the last half."""
    clock, now, rng = RoundClock(), 0.0, random.Random(batch)
    chosen = []
    for _ in range(rounds):
        nodes = budget.choose(batch)
        seconds = clock.start(batch, nodes, now)
        if seconds is not None:
            budget.times.observe(batch, nodes, seconds * 1e6)
        now += us[nodes] * rng.uniform(0.98, 1.02) / 1e6
        drafted = [accepted[n] * 1.3 * rng.uniform(0.9, 1.1) for n in us]
        budget.acceptance.observe(nodes, accepted[nodes] * rng.uniform(0.8, 1.2), drafted)
        chosen.append(nodes)
    late = chosen[rounds // 2 :]
    return max(set(late), key=late.count)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_choice_is_the_one_of_the_offline_rule(batch: int) -> None:
    us = {n: 5000.0 + 30.0 * max(0, batch * n - 100) for n in NODES}
    accepted = {8: 2.0, 16: 2.6, 32: 3.1}
    entries = [
        Timing(batch=batch, kv=1, depth=0, nodes=n, median_us=u, spread_us=0.0, repeats=1)
        for n, u in ({1: 5000.0} | us).items()
    ]  # fmt: skip
    table = CalibrationTable(entries, name="", device="", date="2026-01-01", label="model")
    best, _ = goodput_nodes(table, lambda n: batch * (1 + accepted.get(n, 0.0)), batch, 1)
    assert best == {1: 32, 8: 16, 32: 8}[batch]
    budget = OnlineBudget(NODES, DEPTHS, RoundTimes())
    assert simulate(budget, batch, 400, us, accepted) == best


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
def test_the_choice_follows_a_measured_table(batch: int) -> None:
    table = load_calibration(DATA / "calibration-h200-qwen3.5-9b.json")
    accepted = {1: 0.0, 4: 1.4, 8: 2.1, 16: 2.6, 32: 3.0, 64: 3.3}
    us = {n: table.cost(batch, n, 1024) for n in accepted}
    rates = {n: (1 + accepted[n]) / us[n] for n in accepted}
    times = RoundTimes(lambda rows, nodes: table.cost(rows, nodes, 1024) * 0.9)  # as calibrated, and what is beyond it
    for known in (times, RoundTimes()):
        online = OnlineBudget(tuple(us), (0, 3, 5, 5, 5, 5), known)
        chosen = simulate(online, batch, 600, us, accepted)
        assert rates[chosen] > 0.94 * max(rates.values())


def test_the_choice_changes_with_what_is_accepted() -> None:
    us = {8: 5000.0, 16: 5600.0, 32: 8000.0}
    budget = OnlineBudget(NODES, DEPTHS, RoundTimes())
    assert simulate(budget, 4, 300, us, {8: 1.0, 16: 1.1, 32: 1.2}) == 8
    assert simulate(budget, 4, 600, us, {8: 1.0, 16: 2.0, 32: 4.6}) == 32


def test_rounds_without_drafts_are_left_when_drafts_pay_again() -> None:
    us = {1: 4000.0, 8: 6000.0, 32: 9000.0}
    budget = OnlineBudget((1, 8, 32), (0, 5, 5), RoundTimes())
    assert simulate(budget, 4, 600, us, {1: 0.0, 8: 0.2, 32: 0.3}) == 1
    assert budget.rounds[4][8] + budget.rounds[4][32] < 80
    assert simulate(budget, 4, 1200, us, {1: 0.0, 8: 2.5, 32: 2.8}) == 8


def test_few_rounds_are_spent_on_numbers_that_cannot_win() -> None:
    budget = OnlineBudget(NODES, DEPTHS, RoundTimes())
    simulate(budget, 64, 1000, {8: 9000.0, 16: 18000.0, 32: 36000.0}, {8: 2.0, 16: 2.2, 32: 2.3})
    spent = budget.rounds[64]
    assert spent[16] + spent[32] < 100
    assert spent[8] > 900


def test_a_drafter_that_says_nothing_of_deep_nodes_does_not_hide_a_number() -> None:
    us, accepted = {8: 5000.0, 16: 5300.0, 32: 9000.0}, {8: 1.0, 16: 2.5, 32: 3.0}
    budget = OnlineBudget(NODES, DEPTHS, RoundTimes())
    clock, now = RoundClock(), 0.0
    for _ in range(300):
        nodes = budget.choose(4)
        seconds = clock.start(4, nodes, now)
        if seconds is not None:
            budget.times.observe(4, nodes, seconds * 1e6)
        now += us[nodes] / 1e6
        budget.acceptance.observe(nodes, accepted[nodes], (4e-5, 4e-5, 4e-5))
    assert budget.choose(4) == 16


def test_batches_that_never_stay_take_the_times_of_others() -> None:
    budget = OnlineBudget(NODES, DEPTHS, RoundTimes())
    simulate(budget, 8, 300, {8: 5000.0, 16: 9000.0, 32: 18000.0}, {8: 2.0, 16: 2.2, 32: 2.3})
    chosen = [budget.choose(9 + turn % 7) for turn in range(2000)]
    assert set(chosen[200:]) == {8}


def test_batches_that_never_stay_are_served_without_times() -> None:
    budget = OnlineBudget(NODES, DEPTHS, RoundTimes())
    for turn in range(3000):
        assert budget.choose(turn % 7 + 1) in NODES
    assert budget.rates(3)
