"""Drafts whose accepted length is known: the nodes of one root-to-node path get the tokens that the target will choose.

A random or dummy model accepts next to nothing of what its drafter proposes. What it writes without speculation is
recorded first; then a path of the wanted length in every proposal tree is given those tokens. The target accepts it by
its own greedy choice, along a real tree path, whatever engine verifies, and the text must come out as recorded.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def aim_kernel(
    token_ptr,  # int64 [rows, nodes], written
    position_ptr,  # int64 [rows, nodes], of every node in its text
    child_ptr,  # int64 [rows, nodes], first child or -1
    sibling_ptr,
    which_ptr,  # int64 [rows], row of the texts or -1
    text_ptr,  # int64 [texts, length], -1 after the end
    length,
    nodes,
    vocabulary,
    least,
    most,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    live = i < nodes
    at = b * nodes + i
    position = tl.load(position_ptr + at, mask=live, other=0)
    child = tl.load(child_ptr + at, mask=live, other=-1)
    sibling = tl.load(sibling_ptr + at, mask=live, other=-1)
    token = tl.load(token_ptr + at, mask=live, other=-1)
    which = tl.load(which_ptr + b)
    root = tl.load(position_ptr + b * nodes)
    known = live & (which >= 0) & (position < length)
    truth = tl.load(text_ptr + which * length + position, mask=known, other=-1)
    depth = position - root
    # One more token than drafts is accepted. Another length, and another node of that depth, in every round.
    drawn = (root * 7919 + b * 104729) % 65521
    wanted = least + drawn % (most - least + 1) - 1
    deepest = tl.max(tl.where(live & (depth <= wanted), depth, 0), axis=0)
    key = tl.where(live & (depth == deepest), (i * 40503 + drawn) % 65521, -1)
    node = tl.argmax(key, axis=0).to(tl.int64)
    path = i == node
    for _ in range(BLOCK):
        above = tl.max(tl.where(live & (child == node), i, -1), axis=0)
        before = tl.max(tl.where(live & (sibling == node), i, -1), axis=0)
        # A first child hangs below its parent, another one behind its sibling.
        path = path | (i == above)
        node = tl.where(above >= 0, above, before).to(tl.int64)
        node = tl.where((above < 0) & (before < 0), -2, node)
    aimed = tl.where(path, truth, tl.where(token == truth, (truth + 1) % vocabulary, token))
    tl.store(token_ptr + at, aimed, mask=live & (i > 0) & (truth >= 0))


class Aim:
    """Texts by prompt, and the kernel that writes them into drafts.

    Args:
        path: JSON with ``prompts`` and ``outputs``, lists of token lists.
        length: file with the shortest and the longest accepted length, the target's own token included. It may be
            written anew while the engine runs; 0 leaves the drafts alone.
        vocabulary: of the model.
    """

    def __init__(self, path: Path, length: Path, vocabulary: int) -> None:
        saved = json.loads(path.read_text(encoding="utf-8"))
        texts = [[*p, *o] for p, o in zip(saved["prompts"], saved["outputs"], strict=True)]
        self.rows = {tuple(p): n for n, p in enumerate(saved["prompts"])}
        self.length = max(map(len, texts))
        self.texts = torch.tensor([t + [-1] * (self.length - len(t)) for t in texts], dtype=torch.int64)
        self._file, self._written = length, (0, 0)
        self.least, self.most, self.vocabulary = 0, 0, vocabulary
        self._asked: tuple[list[Any], torch.Tensor] | None = None

    def __call__(self, requests: list[Any], verify_input: Any) -> None:
        """Write the tokens of one path into every tree of a batch.

        Args:
            requests: SGLang's, one a row.
            verify_input: its ``EagleVerifyInput``.
        """
        said = self._file.stat()
        # Times of files are coarser than what is written; a new file has a number of its own.
        written = said.st_ino, said.st_mtime_ns
        if written != self._written:
            self.least, self.most = map(int, self._file.read_text(encoding="utf-8").split())
            self._written = written
        if not self.least:
            return
        device, nodes = verify_input.draft_token.device, verify_input.draft_token_num
        if self.texts.device != device:
            self.texts = self.texts.to(device)
        if self._asked is None or self._asked[0] != [r.rid for r in requests]:
            which = [self.rows.get(tuple(r.origin_input_ids), -1) for r in requests]
            self._asked = [r.rid for r in requests], torch.tensor(which, device=device)
        rows = verify_input.draft_token.numel() // nodes
        tensors = (
            verify_input.draft_token, verify_input.positions, verify_input.retrieve_next_token,
            verify_input.retrieve_next_sibling,
        )  # fmt: skip
        for t in tensors:
            assert t.dtype is torch.int64, f"expected int64, got {t.dtype}"
            assert t.is_contiguous()
        aim_kernel[(rows,)](
            *tensors, self._asked[1], self.texts, self.length, nodes, self.vocabulary, self.least, self.most,
            BLOCK=triton.next_power_of_2(nodes),
        )  # fmt: skip
