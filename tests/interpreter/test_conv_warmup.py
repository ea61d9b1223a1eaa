"""warmup_conv: prepares what calls take, once for every choice, and refuses a kernel that is wrong."""

from __future__ import annotations

import pytest
import torch

from bole_runtime import set_backend
from bole_runtime.conv import warmup_conv
from bole_runtime.kernels.loader import LoadedKernel

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

SMALL = {"channels": 20, "width": 3, "max_nodes": 5, "dtype": torch.float32}


def test_every_size_once() -> None:
    done = warmup_conv(**SMALL, max_batch=2, max_depth=1, bias=True, captured=True, layers=2, packed=True)
    assert {(w.problem.op, w.problem.work) for w in done} == {
        ("tree_conv", 1), ("tree_conv", 2), ("conv_commit", 1), ("conv_commit", 2)
    }  # fmt: skip
    assert all(w.error < 1e-6 for w in done)
    assert all(w.problem.bias == (w.problem.op == "tree_conv") for w in done)


@pytest.mark.parametrize("usual", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_does_not_matter(usual: torch.dtype) -> None:
    before = torch.get_default_dtype()
    want = warmup_conv(**SMALL, max_batch=1)
    torch.set_default_dtype(usual)
    try:
        with torch.device("meta"):
            assert warmup_conv(**SMALL, max_batch=1) == want
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("tree_conv", r"^tree_conv with gather\(.*is off by nan"),
        ("conv_commit", r"^conv_commit with shift\(.*stores other states"),
    ],
)
def test_a_wrong_kernel_is_refused(broken: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LoadedKernel.launch

    def skips(self: LoadedKernel, grid, args) -> None:
        if not self.name.startswith(broken):
            launch(self, grid, args)

    monkeypatch.setattr(LoadedKernel, "launch", skips)
    with pytest.raises(RuntimeError, match=message):
        warmup_conv(**SMALL, max_batch=1)


def test_nothing_to_do_on_other_backends() -> None:
    set_backend("torch")
    assert warmup_conv(**SMALL, max_batch=4) == []
