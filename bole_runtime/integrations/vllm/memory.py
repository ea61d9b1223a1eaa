"""What one state and factors take of vLLM's memory, against its N + 1 states a request. Computed, not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bole_runtime.integrations.vllm.layout import PageLayout
from bole_runtime.state.buffers import RoundBuffers
from bole_runtime.state.config import state_config
from bole_runtime.tree.check import check_capacity

#: Pages a request and layer beside those of the drafts, by vLLM's ``mamba_cache_mode``: ``align``, which its prefix
#: cache needs, keeps the state at the last block boundary as well.
RESIDENT = {"none": 1, "align": 2}


@dataclass(frozen=True)
class SavedMemory:
    """Pages and bytes of all recurrent layers of a rank, for running requests.

    Attributes:
        pages: pages of vLLM's speculative path.
        page_bytes: of one, padding included.
        bole_pages: pages that are left.
        bole_page_bytes: of one: the N further columns of the convolution state are gone.
        factors: bytes of the factors and convolution inputs of a round, outside the pages.
    """

    pages: int
    page_bytes: int
    bole_pages: int
    bole_page_bytes: int
    factors: int

    @property
    def pages_saved(self) -> int:
        """Pages that the KV cache has for other things."""
        return self.pages - self.bole_pages

    @property
    def before(self) -> int:
        """Bytes of vLLM's speculative path."""
        return self.pages * self.page_bytes

    @property
    def after(self) -> int:
        """Bytes with Bole."""
        return self.bole_pages * self.bole_page_bytes + self.factors

    @property
    def saved(self) -> int:
        """Bytes saved; below 0 where factors take more than the pages."""
        return self.before - self.after


def page_bytes(layout: PageLayout, token_bytes: int = 0, multiple: int = 16) -> int:
    """Return the size of a page: vLLM makes those of attention and recurrent layers equal.

    Args:
        layout: of a page.
        token_bytes: keys and values of one token in one attention layer of the rank; 0 for pages without padding.
        multiple: the attention block is a multiple of this many tokens; decided by the attention backend and, with
            ``align``, by the alignment of prefill's checkpoints.

    Raises:
        TypeError: no int.
        ValueError: out of range.
    """
    check_capacity("token_bytes", token_bytes, 0, 2**31 - 1)
    check_capacity("multiple", multiple, 1, 2**31 - 1)
    block = token_bytes * multiple
    return -(-layout.nbytes // block) * block if block else layout.nbytes


def saved_memory(
    layout: PageLayout, *, layers: int, batch: int, mode: str = "none", token_bytes: int = 0, multiple: int = 16,
    nodes: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> SavedMemory:  # fmt: skip
    """Return the pages and bytes that running requests take with and without N + 1 states.

    Layers that vLLM adds to fill up a KV cache group are not counted.

    Args:
        layout: of a page of the speculative path; its ``drafts`` are N.
        layers: recurrent layers.
        batch: running requests, vLLM's ``max_num_seqs``.
        mode: vLLM's ``mamba_cache_mode``, ``none`` or ``align``.
        token_bytes: as in :func:`page_bytes`.
        multiple: as in :func:`page_bytes`.
        nodes: of a tree that Bole verifies; default the chain of N + 1.
        dtype: of q, k and v.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size or name is out of range.
    """
    if mode not in RESIDENT:
        raise ValueError(f"mode: {mode!r} is not allowed; allowed: {', '.join(RESIDENT)}")
    check_capacity("layers", layers, 1, 2**31 - 1)
    check_capacity("batch", batch, 1, 2**31 - 2)
    nodes = layout.drafts + 1 if nodes is None else nodes
    config = state_config([layout.layer] * layers, slots=batch, max_batch=batch, max_nodes=nodes, dtype=dtype)
    resident = RESIDENT[mode] * layers * batch
    return SavedMemory(
        pages=resident + layout.drafts * layers * batch,
        page_bytes=page_bytes(layout, token_bytes, multiple),
        bole_pages=resident,
        bole_page_bytes=page_bytes(replace(layout, drafts=0), token_bytes, multiple),
        factors=sum(RoundBuffers.nbytes(config)),
    )
