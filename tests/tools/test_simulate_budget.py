"""The budget simulator: its output, its inputs, and that its policies do what they are named for."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from budget_sim.acceptance import Recorded, Synthetic
from budget_sim.cost import Machine, model_table
from budget_sim.policies import Settings, Simulation
from simulate_budget import NODES, main

from bole_runtime.budget import save_calibration


def recording(path: Path, **changes: np.ndarray) -> Path:
    """A chain of three drafts whose first two the target follows, and one whose first it refuses."""
    parents = np.array([[-1, 0, 1, 2], [-1, 0, 1, 2]])
    arrays = {
        "parents": parents,
        "scores": np.array([[1.0, 0.9, 0.8, 0.7]] * 2),
        "follow": np.array([[1, 2, -1, -1], [-1, -1, -1, -1]]),
    }
    np.savez(path, **{**arrays, **changes})
    return path


def test_the_tool_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "sim"
    assert main(["--batches", "1,8", "--rounds", "3", "--fixed", "4", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "nobody measured these times" in text
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["policy"] for r in rows[:5]] == [
        "fixed 1", "fixed 4", "published (eps 0.1)", "goodput, uncorrected", "goodput",
    ]  # fmt: skip
    assert [r["batch"] for r in rows] == ["1"] * 5 + ["8"] * 5
    for row in rows:
        rate = float(row["tokens_per_second"])
        assert any(f"{rate + off:,.0f}" in text for off in (-0.1, 0.0, 0.1))  # both are rounded
    assert float(rows[0]["tokens_per_request"]) == 1.0
    # Plain decoding at batch 1 is what the model says.
    assert float(rows[0]["tokens_per_second"]) == pytest.approx(1e6 / Machine().step_us(1, 1, 4096), rel=1e-3)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_recorded_rounds_and_a_calibration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    save_calibration(model_table([1, 64], [1, 2, 4], 4096, 3), costs)
    recorded = recording(tmp_path / "rounds.npz")
    options = [
        "--costs",
        str(costs),
        "--recorded",
        str(recorded),
        "--batches",
        "32",
        "--rounds",
        "30",
        "--fixed",
        "2,64",
    ]
    assert main([*options, "--out", str(tmp_path / "sim")]) == 0
    assert "recorded (rounds.npz, 2 rounds)" in capsys.readouterr().out
    with (tmp_path / "sim.csv").open(newline="") as file:
        rows = {r["policy"]: r for r in csv.DictReader(file)}
    assert "fixed 64" not in rows  # not calibrated
    # Half of the rows accept one of one drafted node.
    assert float(rows["fixed 2"]["tokens_per_request"]) == pytest.approx(1.5, abs=0.07)


def test_goodput_is_near_the_best_fixed_budget_at_every_batch() -> None:
    batches = [1, 32, 256]
    settings = Settings(model_table(batches, NODES, 4096, 8), 4096, 900.0, NODES)
    simulation = Simulation(settings, Synthetic(levels=6), [1, 4, 16, 64], 0.1, rounds=8, seed=1)
    for batch in batches:
        results = {r.policy: r.tokens_per_second for r in simulation.run(batch)}
        best = max(rate for name, rate in results.items() if name.startswith("fixed"))
        assert results["goodput"] > 0.95 * best
    # A fixed budget that is best for one batch is bad for another.
    last = {r.policy: r.tokens_per_second for r in simulation.results if r.batch == 256}
    assert last["fixed 64"] < 0.5 * last["fixed 1"] < last["goodput"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": np.array([[-1, 0, 3, 2], [-1, 0, 1, 2]])}, "parents must come before"),
        ({"follow": np.array([[2, 2, -1, -1], [-1] * 4])}, "follow must name children"),
        ({"follow": np.array([[9, 2, -1, -1], [-1] * 4])}, "follow must name children"),
        ({"scores": np.ones((2, 3))}, "expected three arrays"),
    ],
)
def test_bad_recordings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, np.ndarray], message: str
) -> None:
    path = recording(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=message):
        Recorded(path)
    assert main(["--recorded", str(path), "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(
    "given",
    ["--batches 0", "--batches ,", "--fixed 0", "--ease 1", "--ease 0", "--eps -1", "--eps nan", "--kv -1",
     "--rounds 0", "--draft-us -5"],
    ids=lambda text: text.replace(" ", "="),
)  # fmt: skip
def test_arguments_outside_their_range_are_usage_errors(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(given.split())
    assert caught.value.code == 2
    assert given.split()[0] in capsys.readouterr().err


def test_dots_in_the_name_of_the_files_stay(tmp_path: Path) -> None:
    other = tmp_path / "v1.csv"
    other.write_text("another's\n")
    assert main(["--batches", "1", "--rounds", "1", "--fixed", "2", "--out", str(tmp_path / "v1.5")]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"v1.csv", "v1.5.csv", "v1.5.png"}
    assert other.read_text() == "another's\n"
