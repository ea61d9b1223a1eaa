"""Compiles a Triton kernel for an H200 that need not be there."""

from __future__ import annotations

from typing import Any


def compile_sm90(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    warps: int,
    other: str = "i32",
    aligned: tuple[str, ...] = (),
    registers: int | None = None,
    shared: int = 48 << 10,
    stack: int = 32,
) -> Any:
    """Compile, and check registers, local memory and shared memory.

    Args:
        kernel: the jit function.
        constants: its constexpr arguments.
        types: types of arguments; those not named have ``other``.
        warps: warps of a program.
        other: default type.
        aligned: arguments that are multiples of 16, as a launch with usual tensors finds them.
        registers: what a thread may have, where a launch limits it.
        shared: bytes of shared memory that a program may have.
        stack: bytes of local memory that a thread may have.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bole_codegen.compile.offline import _usage

    names = kernel.arg_names
    assert set(constants) | set(types) <= set(names)
    every = {n: "constexpr" if n in constants else types.get(n, other) for n in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    made = triton.compile(
        ASTSource(kernel, every, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "maxnreg": registers},
    )
    used, local = _usage(made.asm["cubin"])
    assert used <= (registers or 255)
    assert local <= stack, f"spilled tiles: {local} bytes"  # a few words of stack are not
    assert made.metadata.shared <= shared
    return made
