"""The tool that launches kernels for a profiler."""

from __future__ import annotations

import profile_kernels as tool
import pytest
import torch


@pytest.mark.parametrize("family", sorted(tool.HEADS))
def test_every_family_runs_without_a_profiler(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--check-only", "--point", f"{family}:1x4"]) == 0
    assert f"{family} 1x4 done" in capsys.readouterr().out


@pytest.mark.parametrize("point", ["gdn", "gdn:0x4", "gdn:1x0", "gdn:1,4", "unknown:1x4"])
def test_other_points_are_refused(point: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--check-only", "--point", point])
    assert stopped.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_gpu_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--point", "gdn:1x4"]) == 2
    assert "--check-only" in capsys.readouterr().err
