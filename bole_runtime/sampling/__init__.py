"""Lossless acceptance of proposal trees on the device."""

from __future__ import annotations

from bole_runtime.sampling.acceptance import METHODS, accept, accept_predicted
from bole_runtime.sampling.compact import compact_
from bole_runtime.sampling.distribution import draw, target_probs
from bole_runtime.sampling.params import SamplingParams
from bole_runtime.sampling.philox import uniform
from bole_runtime.sampling.result import STATUS_DRAFT, STATUS_LOGITS, STATUS_TOKEN, Acceptance

__all__ = [
    "METHODS",
    "STATUS_DRAFT",
    "STATUS_LOGITS",
    "STATUS_TOKEN",
    "Acceptance",
    "SamplingParams",
    "accept",
    "accept_predicted",
    "compact_",
    "draw",
    "target_probs",
    "uniform",
]
