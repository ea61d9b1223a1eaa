"""``bole-tune --verify``: what it says of the GPU that its times come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_fakes
import pytest
import search_fakes
import table_fakes as fakes

from bole_codegen import cli, which_gpu
from bole_codegen.search.results import Timed
from bole_runtime import gpus
from bole_runtime.kernels.variants import all_variants

COMMIT = fakes.PROBLEM.replace(op="commit")
TRAIN, SERVE = 1 << 30, 1 << 29


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gpu_fakes.Machine]:
    machine = gpu_fakes.Machine()
    gpu_fakes.plug(machine, monkeypatch)
    monkeypatch.setattr(which_gpu, "present", lambda index: "NVIDIA H200")
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    yield machine
    gpu_fakes.unplug()


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    variant = all_variants("commit")[0]
    params = variant.default(COMMIT, gpus.get("h200").limits()).as_dict()
    fakes.write(tmp_path / "out", fakes.entry(COMMIT, params, variant=variant.name))
    return tmp_path / "out"


def _evaluator(monkeypatch: pytest.MonkeyPatch, calls: Path, meanwhile: Any = lambda: None) -> None:
    """Put a fake in the place of the evaluator; something may happen on the machine while it compares."""

    class Evaluator(search_fakes.LocalEvaluator):
        def __init__(self, *args: Any, watch: Any, **options: Any) -> None:
            super().__init__(search_fakes.FakeBench(str(calls)))
            self._watch = watch

        async def screen(self, problem: Any, config: Any, keep: bool = False) -> Any:
            return search_fakes.Screened(1e-6)

        confirm = screen

        async def finals(self, target: Any, configs: Any, device: int) -> Any:
            meanwhile()
            await self._watch.compared(device)
            return {c: Timed(5.5, 0.1) for c in configs}

        def close(self) -> None:
            pass

    monkeypatch.setattr(cli, "MeasuredEvaluator", Evaluator)


def test_other_programs_and_clocks_are_named_as_by_a_search(
    machine: gpu_fakes.Machine,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine.processes[1] = [(TRAIN, "train", 300)]

    def meanwhile() -> None:
        machine.sm[1], machine.temperature[1] = 1410, 84
        machine.processes[1].append((SERVE, "serve", 70))

    _evaluator(monkeypatch, tmp_path / "calls", meanwhile)
    assert cli.main(["--gpu", "h200", "--verify", "--only-out", "--out", str(tables)]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    # Before anything is timed: who reads it may stop here.
    assert lines[0] == (
        f"warning: GPU 0 is shared with train (pid {TRAIN}, 300 MiB): times will be noisy, spreads say how much"
    )
    assert lines[1].startswith(f"warning: GPU 0 is shared at the end with serve (pid {SERVE}, 70 MiB): ")
    assert lines[2].startswith("1 entry does not say how many heads and requests were timed")
    assert lines[3] == f"read: {tables}/h200/gdn.json (1 entry)"
    assert lines[4] == (
        "clocks: SM 1410 MHz, memory 3201 MHz, 84 C at final timings, SM 1980 MHz, memory 3201 MHz, 50 C when the run "
        "began; other programs were on GPU 0"
    )
    assert lines[5] == "1 entry: 1 ok"
    assert captured.out.startswith("ok      commit/gdn/")


def test_json_has_what_was_seen_of_the_gpu(
    machine: gpu_fakes.Machine,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _evaluator(monkeypatch, tmp_path / "calls")
    assert cli.main(["--gpu", "h200", "--verify", "--only-out", "--json", "--out", str(tables)]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    clocks = "GPU 0: SM 1980 MHz, memory 3201 MHz, 50 C, 120 W"
    assert data["device"] == {
        "clocks when the run began": clocks,
        "clocks at final timings": f"{clocks} (1 reading)",
        "clocks at the end": clocks,
    }
    assert data["counts"] == {"ok": 1}
    assert "warning" not in captured.err


def test_nothing_is_said_where_nobody_can_tell(
    machine: gpu_fakes.Machine,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu_fakes.plug(machine, monkeypatch, nvml=False, smi=False)
    _evaluator(monkeypatch, tmp_path / "calls")
    assert cli.main(["--gpu", "h200", "--verify", "--only-out", "--json", "--out", str(tables)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["device"] == {}
    assert captured.err.splitlines()[2:] == ["1 entry: 1 ok"]
