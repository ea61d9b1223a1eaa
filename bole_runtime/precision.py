"""What a precision profile promises: the bounds that the search, ``warmup`` and the benchmarks hold kernels to."""

from __future__ import annotations

#: Largest relative error (Frobenius norm) of an output at fp32, with an fp32 state, against the fp64 recurrence.
OUTPUT_BOUND: dict[str, float] = {"lossless": 5e-6, "fast": 3e-3}
#: The same for a committed state. A fast commit recomputes pseudo-values only, so it is held to less than an output.
STATE_BOUND: dict[str, float] = {"lossless": 1e-6, "fast": 1e-3}
#: What a state's own element type adds when it is written.
STATE_ROUNDING: dict[str, float] = {"fp32": 0.0, "fp16": 1e-3, "bf16": 4e-3}
