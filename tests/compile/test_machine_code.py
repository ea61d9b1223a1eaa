"""Faults of ptxas in machine code: found in what it got wrong, and not where it was right."""

from __future__ import annotations

import pytest

import bole_runtime.kernels.variants.miscompiled as miscompiled
from bole_codegen.compile import CompileError, compile_offline
from bole_codegen.compile.machine_code import faults
from bole_codegen.render import render
from bole_runtime import gpus
from bole_runtime.kernels import Problem, default_config
from bole_runtime.kernels.variants import get_variant

#: Sums of a descriptor's address and its constant half, as ptxas writes them.
RIGHT = """
        /*0010*/                   UIADD3 UR6, UR4, 0x4000, URZ ;
        /*0020*/                   UIADD3 UR8, UP1, UR6, 0x2, URZ ;
        /*0030*/                   UMOV UR9, URZ ;
        /*0040*/                   UIADD3.X UR9, UR9, 0x40000040, URZ, UP1, !UPT ;
        /*0050*/              @!P1 STS [R203+UR6+0x8000], R7 ;
"""
START = "        /*0000*/                   ULDC.64 UR4, c[0x0][0x2b0] ;\n"
PROBLEM = Problem("verify", "gdn", 128, 128, 2, "bf16", "fp32", "raw", "fast", 64, 8, 0, 32)


def code(*lines: str) -> str:
    return START + "".join(f"        /*{16 * (n + 1):04x}*/        {line} ;\n" for n, line in enumerate(lines))


def test_code_that_is_right_has_no_faults() -> None:
    assert faults(START + RIGHT) == []
    assert faults("") == []


def test_a_register_that_nothing_has_written() -> None:
    (fault,) = faults(RIGHT)
    assert "reads UR4, which nothing has written" in fault
    assert "at 0x0010" in fault


@pytest.mark.parametrize(
    "line",
    [
        "UIADD3 UR42, UP1, UR42, 0x40, URZ",
        "@UP0 UIADD3 UR8, UR4, UR7, URZ",
        "UIADD3.64 UR8, UR6, 0x2, URZ",
        "UIADD3.X UR43, UR43, -0x7fffffe0, URZ, UP1, !UPT",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",
        "HGMMA.64x64x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24",
    ],
)
def test_sums_and_descriptors_need_what_they_read(line: str) -> None:
    assert len(faults(code(line))) == 1, line


def test_elsewhere_parts_of_a_register_may_have_no_value() -> None:
    assert faults(code("UPRMT UR32, UR5, 0x7632, UR32")) == []


@pytest.mark.parametrize(
    "lines",
    [
        ("UIMAD.WIDE.U32 UR8, UR4, UR5, URZ", "UIADD3 UR9, UR9, UR8, URZ"),
        ("S2UR UR6, SR_CgaCtaId", "R2UR UR7, R5", "ULEA UR6, UR7, UR6, 0x18"),
        ("ULDC.64 UR6, c[0x0][0x2b0]", "HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24, gsb0"),
        ("ULDC.64 UR6, c[0x0][0x2b0]", "UIADD3.64 UR8, UR6, 0x2, URZ", "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24"),
        ("VOTEU.ANY UP0, P6", "UPLOP3.LUT UP0, UPT, UPT, UPT, UPT, 0x80, 0x0"),
        ("UIADD3 UR8, UP1, UR4, 0x2, URZ", "UMOV UR4, URZ", "UIADD3.X UR9, UR4, 0x40000040, URZ, UP1, !UPT"),
    ],
)
def test_what_was_written_may_be_read(lines: tuple[str, ...]) -> None:
    assert faults(code(*lines)) == []


def test_one_register_for_both_halves_of_a_sum() -> None:
    low, high = "UIADD3 UR10, UP1, UR5, 0x40, URZ", "UIADD3.X UR11, UR5, -0x7fffffe0, URZ, UP1, !UPT"
    (fault,) = faults(code(low, "FMNMX R177, RZ, R177, !PT", high))
    assert "low half" in fault
    assert faults(code(low, "UMOV UR5, URZ", high)) == []


@pytest.mark.slow
def test_a_kernel_that_ran_wrong_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miscompiled, "narrow_product", lambda problem, config: False)
    limits = gpus.get("h200").limits()
    default = get_variant("verify", "fused").default(PROBLEM, limits)
    (kernel,) = render(PROBLEM, get_variant("verify", "fused").config({**default.as_dict(), "bv": 32, "stack": False}))
    with pytest.raises(CompileError, match="miscompiled by ptxas"):
        compile_offline(kernel, PROBLEM, limits)


@pytest.mark.slow
def test_the_defaults_for_many_nodes_are_compiled_right() -> None:
    limits = gpus.get("h200").limits()
    for work in (32, 2048):
        problem = PROBLEM.replace(work=work)
        for kernel in render(problem, default_config(problem, limits)):
            compile_offline(kernel, problem, limits)
