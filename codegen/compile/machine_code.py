"""Faults of ptxas that can be read off a kernel's machine code, without running it.

ptxas 12.8 (Triton 3.6) takes the wrong uniform register for the address in the descriptors of some products (wgmma):
one that nothing has written, the low half of a 64-bit sum for both halves, or one that two ways to the product leave
with different values (:mod:`bole_codegen.compile.uniform_flow`). The product then reads other shared memory than it
should: results change from run to run or with the depth of a tree, and have been seen to end in an illegal access.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bole_codegen.compile.uniform_flow import split_descriptors

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
_UNIFORM = re.compile(r"(gdesc|desc)?\[?\bUR(\d+)(\.64)?")
_ADD = re.compile(r"UR\d+, (UP\d), UR(\d+), ")
_ADD_HIGH = re.compile(r"UR\d+, UR(\d+), .*?(UP\d)")
#: Other than those that begin with U: what writes a uniform register.
_WRITERS = {"R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX"}


def _registers(text: str, wide: bool) -> Iterator[int]:
    """Yield the uniform registers of operands."""
    for found in _UNIFORM.finditer(text):
        count = 4 if found[1] == "gdesc" else 2 if found[1] or found[3] or wide else 1
        yield from range(int(found[2]), int(found[2]) + count)


def _operands(name: str, text: str) -> tuple[set[int], set[int]]:
    """Return the uniform registers that an instruction writes and reads."""
    kind = name.partition(".")[0]
    operands = text.split(", ")
    wide = kind.startswith("U") and (".64" in name or "WIDE" in name)
    written: set[int] = set()
    if (kind.startswith("U") or kind in _WRITERS) and re.fullmatch(r"UR\d+", operands[0]):
        first = int(operands[0][2:])
        written = {first, first + 1} if wide else {first}
        operands = operands[1:]
    if kind.endswith("GMMA") and len(operands) > 1 and re.fullmatch(r"R\d+", operands[1]):
        # With the left operand in registers, the descriptor of the right one is the second of the two.
        found = re.search(r"gdesc\[UR(\d+)\]", text)
        return written, {int(found[1]) + 2, int(found[1]) + 3} if found else set()
    if "WIDE" in name:
        # Factors are 32 bits wide, what is added to their product is 64.
        factors, addend = operands[:-1], operands[-1]
        return written, {*_registers(", ".join(factors), False), *_registers(addend, True)}
    return written, set(_registers(", ".join(operands), wide))


def faults(sass: str) -> list[str]:
    """Return what is wrong with machine code, as ``cuobjdump --dump-sass`` prints that of one kernel; none is usual.

    Code is read from top to bottom, in which order ptxas lays out what leads to what: a register that is only written
    further down is not counted as written.
    """
    found: list[str] = []
    written: set[int] = set()
    low_of: dict[str, int] = {}
    for address, name, text in _INSTRUCTION.findall(sass):
        writes, reads = _operands(name, text)
        where = f"{name} {text} at 0x{address}"
        # Elsewhere it may be right: bytes of a register that a permutation leaves out need no value.
        missing = sorted(reads - written) if name.startswith("UIADD3") or "GMMA" in name else []
        if missing:
            found.append(f"{where} reads UR{missing[0]}, which nothing has written")
        high = _ADD_HIGH.match(text) if name == "UIADD3.X" else None
        if high and low_of.get(high[2]) == int(high[1]):
            found.append(f"{where} takes the low half of a 64-bit sum for its high half")
        low_of = {flag: register for flag, register in low_of.items() if register not in writes}
        low = _ADD.match(text) if name == "UIADD3" else None
        if low and int(low[2]) not in writes:
            low_of[low[1]] = int(low[2])
        written |= writes
    return found + split_descriptors(sass)
