"""A checked call of ``accept``, as the torch walk and the kernel take it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bole_runtime.sampling.params import SamplingParams
from bole_runtime.sampling.result import Acceptance
from bole_runtime.tree import TreeBatch


class AcceptCall(NamedTuple):
    """A checked call.

    ``method`` is ``greedy``, ``sample`` or ``rejection``, or ``predicted`` where ``logits`` holds one token id a node.
    """

    method: str
    logits: torch.Tensor
    tokens: torch.Tensor
    tree: TreeBatch
    params: SamplingParams | None
    draft_probs: torch.Tensor | None
    seeds: torch.Tensor | None
    positions: torch.Tensor | None
    uniforms: torch.Tensor | None
    out: Acceptance
