"""vLLM's state layout as Bole's pools, on tensors. vLLM itself is not imported, and no plug-in is registered yet.

docs/engines.md lists the seams that a plug-in needs.
"""

from __future__ import annotations

from bole_runtime.integrations.vllm.handover import hand_back, take_over
from bole_runtime.integrations.vllm.layout import GroupPools, PageLayout
from bole_runtime.integrations.vllm.memory import SavedMemory, saved_memory
from bole_runtime.integrations.vllm.slots import (
    accepted_nodes,
    accepted_slots,
    chain_parents,
    home_slots,
    to_nodes,
    to_tokens,
)

__all__ = [
    "GroupPools", "PageLayout", "SavedMemory", "accepted_nodes", "accepted_slots", "chain_parents", "hand_back",
    "home_slots", "saved_memory", "take_over", "to_nodes", "to_tokens",
]  # fmt: skip
