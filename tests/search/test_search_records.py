"""Records in a storage that others wrote or changed: none is trusted that cannot be, and none ends a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
import search_fakes as fakes

from bole_codegen.search.results import Timed

GOOD: dict[str, Any] = {
    "variant": "fused",
    "params": {"BV": 64, "STAGES": 2, "MODE": "rhs"},
    "texts": ["0" * 8],
    "median_us": 5.0,
    "spread_us": 0.1,
}
#: JSON, since a storage may hold numbers that Python does not write.
BAD = {
    "median_us": ["NaN", "1e999", "-1", "0", '"5"', "true", "null", "[]", "9" * 400],
    "spread_us": ["NaN", "1e999", "-1", "[]"],
    "layers": ["NaN", "1e999", '"x"', "{}"],
    "error": ["NaN", "1e999", "-1", "true"],
    "stage": ['"later"', "[]", "{}"],
    "texts": ['"0000"', "[1]", "{}", "null"],
    "params": ["[]", '{"BV": [64]}', '{"BV": 63}', "null"],
    "variant": ['"nosuch"', '["fused"]', "null"],
    "kind": ['"busy"', '"nosuch"', "[]", "{}", "1"],
}
CHANGED = [json.dumps(GOOD)[:-1] + f', "{name}": {value}}}' for name, values in BAD.items() for value in values]


@pytest.mark.parametrize("text", [*CHANGED, "{}", "[]", "no json", "[" * 100_000])
def test_a_record_that_cannot_be_is_left_out(tmp_path: Path, text: str) -> None:
    driver, _ = fakes.make(tmp_path, trials=1)
    store, (target,) = driver.environment.store, fakes.targets((1,))
    for attrs in ({"record": json.dumps(GOOD)}, {"record": text}, {}):
        trial = optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs=attrs)
        store._study(target).add_trial(trial)
    assert [(n, r.outcome) for n, r in store.load(target)] == [(0, Timed(5.0, 0.1))]
    assert store.count(target) == 3


def test_a_record_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    fakes.run(tmp_path, fakes.targets((1,)), trials=6)
    driver, _ = fakes.make(tmp_path, trials=6)
    store, (target,) = driver.environment.store, fakes.targets((1,))
    found = store.load(target)
    for trial in store._study(target).get_trials():
        store._study(target).add_trial(trial)
    assert store.load(target) == found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("median_us", v) for v in (float("nan"), float("inf"), 0.0, -1.0, "5", None)],
        *[("error", v) for v in (float("nan"), -1.0, "x")],
        *[("params", v) for v in ({}, {"BV": 63}, [], {"BV": [64]})],
        *[("variant", v) for v in ("nosuch", None, ["fused"])],
        *[("kernels", v) for v in ([], None, "x")],
        *[("nodes", v) for v in (32, -1, 10**400)],
        *[("trials", v) for v in (None, "x", -1, 1)],
        ("entry", None),
        ("entry", []),
    ],
)
def test_a_result_that_cannot_be_is_searched_again(tmp_path: Path, name: str, value: Any) -> None:
    chosen = fakes.targets((1,))
    _, before = fakes.run(tmp_path, chosen, trials=8)
    driver, _ = fakes.make(tmp_path, trials=8)
    store, (target,) = driver.environment.store, chosen
    data = store.final(target)
    assert data is not None
    (data if name in ("entry", "trials") else data["entry"])[name] = value
    store.set_final(target, data)
    result, saved = fakes.run(tmp_path, chosen, trials=8)
    assert not any(b.reused for b in result.buckets)
    assert [(e.variant, e.params) for e in saved] == [(e.variant, e.params) for e in before]


@pytest.mark.parametrize("name", ["stale", "duplicates", "bandwidth_gbs"])
@pytest.mark.parametrize("value", [float("nan"), -1, "x", [{}], {}, None, True])
def test_what_is_said_beside_a_result_may_be_anything(tmp_path: Path, name: str, value: Any) -> None:
    chosen = fakes.targets((1,))
    fakes.run(tmp_path, chosen, trials=8)
    driver, _ = fakes.make(tmp_path, trials=8)
    store, (target,) = driver.environment.store, chosen
    store.set_final(target, {**(store.final(target) or {}), name: value})
    result, saved = fakes.run(tmp_path, chosen, trials=8)
    assert len(saved) == 1
    assert all(b.reused for b in result.buckets)
