"""Values of uniform registers along the ways through machine code: what the descriptors of a product are made of.

ptxas 12.8 (Triton 3.6) has been seen to make them from a register that two ways to the product leave with different
values, each a constant distance from the start of shared memory: right after one loop, wrong after another.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
_TOKEN = re.compile(r"\b(UR\d+|UP\d)\b")
#: What a register may hold that no uniform instruction made: unknown, but the same wherever it comes from one place.
_OPAQUE = ("R2UR", "REDUX", "VOTEU", "S2UR", "CS2UR", "R2P")
_BRANCHES = ("BRA", "BRX", "JMP", "EXIT", "RET", "BREAK", "BSYNC")

Value = tuple[Any, ...]
State = dict[str, Value]


@dataclass
class _Block:
    code: list[tuple[int, str, str, str]]
    next: list[int] = field(default_factory=list)
    entry: State | None = None


def _blocks(sass: str) -> dict[int, _Block]:
    """Return the basic blocks of code by the address of their first instruction."""
    code = [(int(a, 16), guard, name, text) for a, guard, name, text in _LINE.findall(sass)]
    if not code:
        return {}
    addresses = {c[0] for c in code}
    rejoin: dict[str, int] = {}
    targets: dict[int, list[int]] = {}
    for address, _, name, text in code:
        kind = name.partition(".")[0]
        goal = re.search(r"0x([0-9a-f]+)\s*$", text)
        if kind == "BSSY" and goal:
            rejoin[text.partition(",")[0].strip()] = int(goal[1], 16)
        elif kind == "BSYNC":
            targets[address] = [rejoin[b] for b in [text.strip()] if b in rejoin]
        elif kind in ("BRA", "JMP") and goal:
            targets[address] = [int(goal[1], 16)]
    leaders = {code[0][0]}
    leaders |= {t for goals in targets.values() for t in goals if t in addresses}
    for (_, _, name, _), after in itertools.pairwise(code):
        if name.partition(".")[0] in _BRANCHES:
            leaders.add(after[0])
    blocks: dict[int, _Block] = {}
    for instruction in code:
        if instruction[0] in leaders:
            first = instruction[0]
            blocks[first] = _Block([])
        blocks[first].code.append(instruction)
    followers: list[int | None] = [*list(blocks)[1:], None]
    for block, follower in zip(blocks.values(), followers, strict=True):
        address, guard, name, text = block.code[-1]
        ends = name.partition(".")[0] in ("BRA", "JMP", "EXIT", "RET", "BSYNC") and not guard
        # A branch on a uniform predicate names it among its operands.
        ends = ends and not re.match(r"!?U?P\d", text)
        block.next = [t for t in targets.get(address, []) if t in blocks]
        if follower is not None and (not ends or (name.startswith("BSYNC") and not block.next)):
            block.next.append(follower)
    return blocks


def _width(name: str) -> int:
    """How many vector registers an instruction writes, at most."""
    if tile := re.match(r"\w*GMMA\.64x(\d+)x", name):
        return int(tile[1]) // 2
    if name.startswith("LD") or "MMA" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1


def _saved(state: State, guard: str, name: str, text: str) -> bool:
    """Apply an instruction to the uniform values that vector registers keep; whether one is got back."""
    operands = text.split(", ")
    if name == "R2UR" and not guard and len(operands) == 2 and (kept := state.get(operands[1])):
        state[operands[0]] = kept
        return True
    if goal := re.fullmatch(r"R(\d+)", operands[0]):
        for n in range(_width(name)):
            state.pop(f"R{int(goal[1]) + n}", None)
        if name == "MOV" and not guard and re.fullmatch(r"UR\d+", operands[-1]):
            state[operands[0]] = state.get(operands[-1], ("unset", operands[-1]))
    return False


def _step(state: State, address: int, guard: str, name: str, text: str) -> None:
    """Apply one instruction to the values of registers."""
    kind = name.partition(".")[0]
    if _saved(state, guard, name, text) or (not kind.startswith("U") and kind not in _OPAQUE):
        return
    operands = text.split(", ")
    written = [o for o in operands[:1] if _TOKEN.fullmatch(o)]
    # The carry of a sum, and the second of two predicates, are results too.
    while len(written) < len(operands) and re.fullmatch(r"UP\d", operands[len(written)]):
        written.append(operands[len(written)])
    if not written:
        return
    rest = ", ".join(operands[len(written) :])
    if kind == "S2UR" and not guard and rest.startswith(("SR_CTAID", "SR_Cga")):
        made: Value = ("is", rest)
    elif guard or kind in _OPAQUE or re.search(r"\bR\d+", rest):
        made = ("at", address)
    elif kind == "UMOV":
        made = state.get(rest, ("unset", rest)) if _TOKEN.fullmatch(rest) else ("is", rest)
    else:
        wide = ".64" in name or "WIDE" in name
        names = [n for t in _TOKEN.findall(rest) for n in ([t, f"UR{int(t[2:]) + 1}"] if wide and t[1] == "R" else [t])]
        made = (name, _TOKEN.sub("_", rest), *(state.get(n, ("unset", n)) for n in names))
    for i, register in enumerate(written):
        state[register] = made if register[1] == "R" else ("flag", i, made)
        if register[1] == "R" and (".64" in name or "WIDE" in name):
            state[f"UR{int(register[2:]) + 1}"] = ("high", made)


def _made_of(value: Value, way: Value, ways: dict[Value, set[Value]], seen: set[Value]) -> bool:
    """Whether a value is computed from another one, a loop having carried that on."""
    if value == way:
        return True
    if value in seen:
        return False
    seen.add(value)
    parts = ways.get(value, set()) if value[0] == "way" else {v for v in value if isinstance(v, tuple)}
    return any(_made_of(v, way, ways, seen) for v in parts)


def _leaves(value: Value, ways: dict[Value, set[Value]]) -> set[Value] | None:
    """Return what a value can be, by the way taken; None where a loop carries it on, as it may a buffer's number."""
    if value[0] != "way":
        return {value}
    found: set[Value] = set()
    for one in ways.get(value, set()):
        more = None if _made_of(one, value, ways, set()) else _leaves(one, ways)
        if more is None:
            return None
        found |= more
    return found


def _differs(value: Value, ways: dict[Value, set[Value]], seen: set[Value]) -> bool:
    """Whether some part of a value is one thing or another by the way taken."""
    if value in seen:
        return False
    seen.add(value)
    if value[0] == "way":
        leaves = _leaves(value, ways)
        return leaves is not None and len(leaves) > 1
    return any(_differs(v, ways, seen) for v in value if isinstance(v, tuple))


def split_descriptors(sass: str) -> list[str]:
    """Return the products whose descriptor depends on the way taken to them.

    Args:
        sass: code of one kernel, as ``cuobjdump --dump-sass`` prints it.
    """
    blocks = _blocks(sass)
    if not blocks:
        return []
    ways: dict[Value, set[Value]] = {}
    first = next(iter(blocks))
    blocks[first].entry = {}
    found: dict[int, str] = {}
    for _ in range(64):
        changed = False
        leaving: dict[int, list[State]] = {}
        found.clear()
        for block in blocks.values():
            if block.entry is None:
                continue
            state = dict(block.entry)
            for address, guard, name, text in block.code:
                if "GMMA" in name and (gdesc := re.search(r"gdesc\[UR(\d+)\]", text)):
                    low = int(gdesc[1]) + (2 if re.match(r"R\d+, R\d+", text) else 0)
                    for n in range(low, int(gdesc[1]) + 4):
                        value = state.get(f"UR{n}", ("unset", n))
                        if _differs(value, ways, set()):
                            found[address] = (
                                f"{name} {text} at 0x{address:x} reads UR{n}, whose value depends on the way there"
                            )
                _step(state, address, guard, name, text)
            for goal in block.next:
                leaving.setdefault(goal, []).append(state)
        for at, states in leaving.items():
            merged: State = {}
            for register in set().union(*states):
                values = {s.get(register, ("unset", register)) for s in states}
                if len(values) == 1:
                    merged[register] = values.pop()
                else:
                    way = ("way", at, register)
                    ways[way] = values - {way}
                    merged[register] = way
            if at == first:
                continue
            if merged != blocks[at].entry:
                blocks[at].entry = merged
                changed = True
        if not changed:
            break
    return list(found.values())
