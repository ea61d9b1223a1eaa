"""The bench on a real device: checks, times, and candidates that break their process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bole_codegen.render import render
from bole_codegen.search import compiler, evaluators
from bole_codegen.search.evaluators import MeasuredEvaluator
from bole_codegen.search.results import Failed, Screened, Timed
from bole_codegen.search.targets import Geometry, Target, make_targets

pytestmark = pytest.mark.gpu


def _targets(**changes: Any) -> tuple[Target, ...]:
    options: dict[str, Any] = {
        "ops": ["verify", "commit"],
        "families": ["gdn"],
        "in_dtypes": ["bf16"],
        "state_dtypes": ["fp32"],
        "gate_modes": ["raw"],
        "precisions": ["lossless"],
        "nodes": [16],
        "batches": [8],
        "pendings": [0],
    }
    return make_targets([Geometry(16, 32, 128, 128)], **{**options, **changes})


def _record() -> Any:
    import torch

    from bole_runtime import gpus

    record = gpus.identify(torch.cuda.get_device_name())
    if record is None:
        pytest.skip("this GPU has no record")
    return record


@pytest.mark.parametrize("target", _targets(pendings=[0, 16]), ids=lambda t: t.problem.key())
def test_a_default_is_checked_and_timed(target: Target) -> None:
    from bole_codegen.search.gpu_bench import GpuBench
    from bole_runtime.kernels.default import default_config

    record = _record()
    bench = GpuBench(0, 0, record.l2_bytes)
    config = default_config(target.problem, record.limits())
    assert bench.gate(target.kernels, config) < 1e-2
    assert bench.check(target.kernels, config) < 1e-5
    floor = bench.floor_bytes(target) / bench.bandwidth() * 1e-3
    times = []
    # Other tests may run on the GPU meanwhile: the two are told apart by what they measure at a quiet moment.
    for _ in range(5):
        quick = bench.quick(target, config)
        (final,) = bench.finals(target, [config], 10)
        assert isinstance(final, Timed)
        assert final.median_us > floor
        times.append((quick.median_us, final.median_us))
        if quick.median_us == pytest.approx(final.median_us, rel=0.5) and final.median_us < 100 * floor:
            return
    pytest.fail(f"quick and final times, us: {times}; floor {floor:.2f}")


def _evaluator(record: Any, factory: str, plant: dict[str, str]) -> MeasuredEvaluator:
    evaluator = MeasuredEvaluator(
        record, render, factory=f"gpu_plants:{factory}", compiler="compile_plants:PlantedCompiler"
    )
    for pool in (evaluator._compiler.pool, evaluator._checkers, *evaluator._timers):
        for options in pool._options:
            options["plant"] = plant
    return evaluator


def _screen(evaluator: MeasuredEvaluator, jobs: list[Any], keep: bool = True) -> list[str]:
    async def every() -> list[Any]:
        return list(await asyncio.gather(*(evaluator.screen(p, c, keep) for p, c in jobs)))

    try:
        return [r.kind if isinstance(r, Failed) else "ok" for r in asyncio.run(every())]
    finally:
        evaluator.close()


def test_candidates_that_break_the_device_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_runtime.kernels.variants import all_variants

    monkeypatch.setattr(evaluators, "CHECK_LIMIT", 25.0)
    record = _record()
    (target,) = _targets(ops=["commit"])
    configs = list(all_variants("commit")[0].enumerate(target.problem, record.limits()))[:6]
    kinds = ["illegal", "hang", "wrong", "crash", "bounds"]
    plant = {str(c): k for c, k in zip(configs, kinds, strict=False)}
    found = _screen(_evaluator(record, "PlantedBench", plant), [(target.kernels, c) for c in configs])
    assert found == [*kinds, "ok"]


def _steps(target: Target, record: Any) -> tuple[list[Any], Any]:
    """Return configurations of one commit variant but its default, and that one."""
    from bole_runtime.kernels.default import default_config
    from bole_runtime.kernels.variants import get_variant

    default = default_config(target.problem, record.limits())
    assert default.variant == "steps"
    every = get_variant("commit", "steps").enumerate(target.problem, record.limits())
    return [c for c in every if c != default], default


def test_candidates_that_do_not_compile_fit_or_answer_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from compile_plants import COMPILING

    monkeypatch.setattr(compiler, "COMPILE_LIMIT", 30.0)
    record = _record()
    (target,) = _targets(ops=["commit"])
    kinds = {
        **COMPILING,
        "shared launch": "resources",
        "refused launch": "compile",
        "killed": "killed",
        "raise": "error",
    }
    configs = _steps(target, record)[0][: len(kinds) + 1]
    plant = {str(c): how for c, how in zip(configs, kinds, strict=False)}
    found = _screen(_evaluator(record, "PlantedBench", plant), [(target.kernels, c) for c in configs], keep=False)
    assert dict(zip(kinds, found, strict=False)) == kinds
    assert found[-1] == "ok"


def test_a_search_with_planted_faults_ends_in_a_right_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration of one variant, half of which fail."""
    import msgspec
    from compile_plants import COMPILING
    from gpu_plants import RUNNING

    from bole_codegen import cli
    from bole_codegen.measure import read_clocks
    from bole_codegen.measure.watch import Watch
    from bole_codegen.search.outcome import Options
    from bole_codegen.search.progress import Progress
    from bole_codegen.search.session import Session
    from bole_codegen.tables import gather
    from bole_runtime.kernels.variants import get_variant
    from bole_runtime.tables.load import load_table

    monkeypatch.setattr(evaluators, "CHECK_LIMIT", 25.0)
    monkeypatch.setattr(compiler, "COMPILE_LIMIT", 30.0)
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    record = _record()
    (target,) = _targets(ops=["commit"])
    configs, default = _steps(target, record)
    kinds = {**COMPILING, **RUNNING}
    plant = {str(c): how for c, how in zip(configs, kinds, strict=False)}
    evaluator = _evaluator(record, "PlantedBench", plant)
    evaluator._watch = watch = Watch([0])
    watch.begin()
    session = Session(
        record, gather(record), [target], evaluator, Options(trials=100, anchors=1, top=2, rounds=2),
        str(tmp_path / "journal"), tmp_path / "out", False, 0, Progress(),
        variants=lambda op: [get_variant(op, "steps")] if op == "commit" else [], watch=watch,
    )  # fmt: skip
    try:
        result = session.run()
    finally:
        evaluator.close()
    for kind in set(kinds.values()):  # One that fails by itself, spills most likely, counts too.
        assert result.failures.get(kind, 0) >= list(kinds.values()).count(kind), (kind, result.failures)
    (path,) = session.paths
    table = load_table(path, session.variants)
    (entry,) = (e.entry for e in table.entries)
    chosen = get_variant("commit", "steps").config(entry.params)
    assert str(chosen) not in plant
    assert (entry.label, entry.error < 1e-4) == ("measured", True)
    assert chosen == default or entry.median_us < entry.default_us
    assert "at final timings" in table.header.gpu.clocks or read_clocks(0) is None
    # What is wrong on such a GPU is not run again; what was killed or does not fit may be.
    (bad,) = (tmp_path / "out" / record.key / "known-bad").glob("*.json")
    listed = {entry["kind"] for entry in msgspec.json.decode(bad.read_bytes())["entries"]}
    assert listed == {"illegal", "hang", "crash", "wrong", "bounds"}
    # And the table stands: the entry is right and no slower than the default.
    assert cli.main(["--gpu", record.key, "--verify", "--out", str(tmp_path / "out")]) == 0


def test_the_check_sees_what_a_kernel_does_wrong() -> None:
    from bole_runtime.kernels.variants import get_variant

    record = _record()
    (target,) = _targets(ops=["verify"])
    configs = list(get_variant("verify", "fused").enumerate(target.problem, record.limits()))[:6]
    kinds = ["wrong", "nan", "bounds", "canary", "races"]
    plant = {str(c): k for c, k in zip(configs, kinds, strict=False)}
    found = _screen(_evaluator(record, "CorruptedBench", plant), [(target.kernels, c) for c in configs])
    assert found == ["wrong", "nan", "bounds", "bounds", "races", "ok"]


def test_a_launch_finds_the_kernels_that_were_compiled_without_the_device(tmp_path: Any, monkeypatch: Any) -> None:
    """If a launch compiled them again, the timing process would compile one after the other."""
    from bole_runtime.kernels.default import default_config

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    record = _record()

    def kernels() -> set[str]:
        # Of a search: building trees and the torch backend may compile others.
        return {str(path) for path in tmp_path.glob("*/gdn_*.cubin")}

    for target in _targets(precisions=["fast", "lossless"]):
        config = default_config(target.problem, record.limits())
        evaluator = MeasuredEvaluator(record, render)

        async def cubins(target: Any = target, config: Any = config, evaluator: Any = evaluator) -> Any:
            await evaluator._compiler.candidate(target.kernels, config)
            await evaluator._compiler.candidate(target.kernels, config, wide=True)
            ahead = kernels()
            for call in (evaluator.screen(target.kernels, config), evaluator.confirm(target.kernels, config)):
                assert isinstance(await call, Screened)
            await evaluator.quick(target, config, 0)
            return ahead, kernels()

        try:
            before, after = asyncio.run(cubins())
        finally:
            evaluator.close()
        assert before
        assert sorted(after - before) == []


def test_a_search_of_one_bucket_says_where_its_time_went(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    import json

    from bole_codegen import cli

    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    record = _record()
    line = f"--gpu {record.key} --hk 16 --hv 32 --dk 128 --dv 128 --nodes 16 --batch 8 --precision lossless --json"
    status = cli.main([*line.split(), "--effort", "quick", "--time-budget", "120", "--out", str(tmp_path / "out")])
    data = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {e["label"] for e in data["entries"]} == {"measured"}
    assert all(e["median_us"] <= e["default_us"] for e in data["entries"] if e["default_us"] is not None)
    print(data["where_the_time_went"])
    assert data["where_the_time_went"]["device_busy"] > 0
    assert cli.main(["--gpu", record.key, "--verify", "--out", str(tmp_path / "out")]) == 0
