"""Lossless tree decoding of hybrid transformers models: every proposal tree in one forward, on a CPU or a GPU.

``import bole_runtime.integrations.transformers`` does not import transformers; the first decoder does.
"""

from __future__ import annotations

from bole_runtime.integrations.transformers.decode import RoundResult, TreeDecoder
from bole_runtime.integrations.transformers.draft import Drafter, DraftSession, HiddenDrafter, PromptLookup, Proposal
from bole_runtime.integrations.transformers.draft_model import ModelDrafter
from bole_runtime.integrations.transformers.generate import generate, stream
from bole_runtime.integrations.transformers.mtp import MtpHead
from bole_runtime.integrations.transformers.mtp_session import MtpDrafter

__all__ = [
    "DraftSession",
    "Drafter",
    "HiddenDrafter",
    "ModelDrafter",
    "MtpDrafter",
    "MtpHead",
    "PromptLookup",
    "Proposal",
    "RoundResult",
    "TreeDecoder",
    "generate",
    "stream",
]
