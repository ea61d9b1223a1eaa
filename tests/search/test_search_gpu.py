"""The bench on a real device: checks, times, and candidates that break their process."""

from __future__ import annotations

from typing import Any

import pytest

from bole_codegen.search import evaluators
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
    screened = bench.screen(target.kernels, config)
    assert screened.error is not None
    quick = bench.quick(target, config)
    (final,) = bench.finals(target, [config], 10)
    assert isinstance(final, Timed)
    floor = bench.floor_bytes(target) / bench.bandwidth() * 1e-3
    assert floor < final.median_us < 100 * floor
    assert quick.median_us == pytest.approx(final.median_us, rel=0.5)


def test_candidates_that_break_the_device_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_runtime.kernels.variants import all_variants

    monkeypatch.setattr(evaluators, "SCREEN_LIMIT", 60.0)
    record = _record()
    (target,) = _targets(ops=["commit"])
    variant = all_variants("commit")[0]
    configs = list(variant.enumerate(target.problem, record.limits()))[:4]
    plant = {str(configs[0]): "illegal", str(configs[1]): "hang", str(configs[2]): "wrong"}
    evaluator = MeasuredEvaluator(record, workers=1, factory="gpu_plants:PlantedBench")
    evaluator._screeners._options["plant"] = plant
    found: dict[int, Any] = {}
    try:
        evaluator.screen([(target.kernels, c) for c in configs], found.__setitem__, lambda: False)
    finally:
        evaluator.close()
    assert [r.kind if isinstance(r, Failed) else "ok" for _, r in sorted(found.items())][:3] == [
        "illegal",
        "hang",
        "wrong",
    ]
    assert isinstance(found[3], Screened)
