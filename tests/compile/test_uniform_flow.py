"""Descriptors whose value depends on the way taken to a product."""

from __future__ import annotations

from pathlib import Path

from bole_codegen.compile.uniform_flow import split_descriptors

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0"


def code(*lines: str) -> str:
    return "".join(f"        /*{16 * n:04x}*/        {line} ;\n" for n, line in enumerate(lines))


def branch(first: str, second: str, *after: str) -> str:
    """Code of which either ``first`` or ``second`` runs, and then ``after``."""
    return code("ULEA UR6, UR5, UR4, 0x18", "@P0 BRA 0x40", first, "BRA 0x50", second, *after, PRODUCT, "EXIT")


BASE = ("UMOV UR11, 0x40000040",)


def test_two_ways_with_two_values() -> None:
    (fault,) = split_descriptors(branch("UMOV UR10, UR6", "UIADD3 UR10, UR6, 0x2, URZ", *BASE))
    assert "reads UR10, whose value depends on the way there" in fault
    assert "at 0x60" in fault


def test_what_is_made_of_such_a_value() -> None:
    later = ("UIADD3.64 UR10, UR14, 0x7e, URZ",)
    assert split_descriptors(branch("UMOV UR14, UR6", "UIADD3 UR14, UR6, 0x2, URZ", *later))
    assert not split_descriptors(branch("UMOV UR14, UR6", "UMOV UR14, UR6", *later))


def test_two_ways_with_one_value() -> None:
    made = "UIADD3 UR10, UR6, 0x2, URZ"
    assert split_descriptors(branch(made, made, *BASE)) == []


def test_a_value_that_both_ways_leave_alone() -> None:
    assert split_descriptors(branch("UMOV UR20, UR6", "UMOV UR20, 0x7", "UMOV UR10, UR6", *BASE)) == []


def test_the_number_of_a_buffer_goes_round_a_loop() -> None:
    loop = ("UMOV UR10, UR6", *BASE, PRODUCT, "UIADD3 UR10, UR10, 0x80, URZ", "@P0 BRA 0x10", "EXIT")
    assert split_descriptors(code(*loop)) == []


SAVED = ("UMOV UR10, UR6", *BASE, "MOV R7, UR10", PRODUCT, "UIADD3 UR10, UR6, 0x2, URZ")


def test_a_register_that_is_saved_and_got_back_in_a_loop() -> None:
    assert split_descriptors(code(*SAVED, "R2UR UR10, R7", "@P0 BRA 0x30", "EXIT")) == []
    assert split_descriptors(code(*SAVED, "@P0 BRA 0x30", "EXIT"))


def test_a_saved_register_that_something_else_is_written_to() -> None:
    for other in ("IMAD.WIDE R6, R1, R2, R4", "LDG.E.128 R4, [R2]", "HGMMA.64x16x16.F32 R0, R56, gdesc[UR4], R0"):
        assert split_descriptors(code(*SAVED, other, "R2UR UR10, R7", "@P0 BRA 0x30", "EXIT"))


def test_code_without_products() -> None:
    assert split_descriptors("") == []
    assert split_descriptors(code("UMOV UR4, URZ", "EXIT")) == []


def test_a_kernel_that_ran_wrong() -> None:
    """Its error on an H200 was 0.11 for trees of up to 11 levels, whose solve takes the first of two loops alone.

    The code is that of ``fused`` at d1e18eb (Gated DeltaNet, bf16 state, 64 nodes, ``fast``, ptxas 12.8.93), cut to
    what uniform registers and branches do in the solve and behind it. Kernels of later templates do not have the fault.
    """
    faults = split_descriptors((Path(__file__).parent / "split_descriptor.sass").read_text())
    assert faults
    assert all("reads UR11, whose value depends on the way there" in f for f in faults)
