"""Bole inside SGLang, by its plug-in mechanism: no fork, no patch.

``pip install bole`` beside SGLang, then ``BOLE_SGLANG=1``: Gated DeltaNet (Qwen3.5, Qwen3-Next), KDA (Kimi Linear) and
Mamba2 models (Nemotron-H, Falcon-H1, Granite 4) verify trees and chains of drafters with Bole's kernels.
``BOLE_SGLANG_PRECISION=fast`` takes the faster profile, ``BOLE_SGLANG_BUDGET=auto`` chooses the number of draft tokens
for every round. Without the first variable nothing is touched. docs/engines.md lists every seam.
"""

from __future__ import annotations

from bole_runtime.integrations.sglang.budget_seams import BUDGET_CHANGED, BUDGET_READ
from bole_runtime.integrations.sglang.hooks import register
from bole_runtime.integrations.sglang.seams import CHANGED, KNOWN_VERSIONS, READ, Seam, SeamError, missing, unpacked

__all__ = [
    "BUDGET_CHANGED", "BUDGET_READ", "CHANGED", "KNOWN_VERSIONS", "READ", "Seam", "SeamError", "missing", "register",
    "unpacked",
]  # fmt: skip
