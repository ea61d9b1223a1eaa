"""Searches of convolutions on a real device."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bole_codegen.render import render
from bole_codegen.search.conv_targets import ConvGeometry, make_conv_targets
from bole_codegen.search.evaluators import MeasuredEvaluator
from bole_codegen.search.results import Screened, Timed
from bole_codegen.search.targets import Target
from bole_runtime.kernels.default import default_config

pytestmark = pytest.mark.gpu

TARGETS = make_conv_targets(
    [ConvGeometry(8192, 4, 3)], ops=["tree_conv", "conv_commit"], in_dtypes=["bf16"], state_dtypes=["bf16"],
    nodes=[16], batches=[8], pendings=[0, 16],
)  # fmt: skip


def _record() -> Any:
    import torch

    from bole_runtime import gpus

    record = gpus.identify(torch.cuda.get_device_name())
    if record is None:
        pytest.skip("this GPU has no record")
    return record


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.problem.key())
def test_a_default_is_checked_and_timed(target: Target) -> None:
    from bole_codegen.search.gpu_bench import GpuBench

    record = _record()
    bench = GpuBench(0, 0, record.l2_bytes)
    config = default_config(target.problem, record.limits())
    assert bench.gate(target.kernels, config) < 2**-8
    assert bench.check(target.kernels, config) < 1e-6
    quick = bench.quick(target, config)
    (final,) = bench.finals(target, [config], 10)
    assert isinstance(final, Timed)
    floor = bench.floor_bytes(target) / bench.bandwidth() * 1e-3
    assert floor < final.median_us < 100 * floor
    assert quick.median_us == pytest.approx(final.median_us, rel=0.5)


@pytest.mark.parametrize("nb", [1, 16])
def test_a_launch_finds_the_kernels_that_were_compiled_without_the_device(
    nb: int, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    record = _record()

    def kernels() -> set[str]:
        # Of a search: building trees and the torch backend may compile others.
        return {str(path) for path in tmp_path.glob("*/*conv_*.cubin")}

    for target in TARGETS:
        config = default_config(target.problem, record.limits())
        if target.problem.op == "tree_conv":
            config = type(config)(config.variant, (("bc", 256), ("nb", nb), ("warps", 4)))
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


def test_a_search_of_one_convolution_serves_its_calls(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    import torch

    from bole_codegen import cli
    from bole_runtime.tables.lookup import Dispatcher
    from bole_runtime.tables.schema import ConvEntry

    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    record, out = _record(), tmp_path / "out"
    line = f"--gpu {record.key} --ops tree_conv --channels 8192 --width 4 --nodes 16 --batch 8 --json"
    status = cli.main([*line.split(), "--effort", "quick", "--time-budget", "120", "--out", str(out)])
    data = json.loads(capsys.readouterr().out)
    assert status == 0
    (entry,) = data["entries"]
    assert (entry["label"], entry["timed_channels"]) == ("measured", 8192)
    assert entry["floor_us"] < entry["median_us"] <= entry["default_us"]
    assert entry["error"] < 1e-6
    found = Dispatcher((out,), user_roots=1).resolve(
        ConvEntry(**{k: v for k, v in entry.items() if k != "key"}).problem(),
        torch.cuda.get_device_name(),
        record.limits(),
    )
    assert found.config.as_dict() == entry["params"]
    assert cli.main(["--gpu", record.key, "--verify", "--out", str(out)]) == 0
