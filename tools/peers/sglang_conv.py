"""SGLang's convolution along trees, which walks each tree node by node and keeps a window a node."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers.base import PeerUnavailable
from peers.sglang_loader import TESTED_VERSION, _in_sys_modules, _stand_ins

CONV_FILE = "sglang/kernels/ops/mamba/causal_conv1d_triton.py"
ENTRY = "causal_conv1d_update"


def load_conv(path: str | None, cache: Path) -> Callable[..., torch.Tensor]:
    """Return SGLang's ``causal_conv1d_update`` from a wheel, an unpacked wheel or site-packages.

    Args:
        path: the path, or None.
        cache: where a wheel's file is written, since Triton reads a kernel's source from a file.

    Raises:
        PeerUnavailable: no path, or another version's layout.
    """
    if not path:
        raise PeerUnavailable("no --sglang PATH given (a wheel, an unpacked wheel, or site-packages with sglang)")
    given = Path(path).expanduser()
    file = given / CONV_FILE
    if not file.is_file() and given.name == "sglang":
        file = given.parent / CONV_FILE
    if given.is_file():
        try:
            with zipfile.ZipFile(given) as archive:
                data = archive.read(CONV_FILE)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise PeerUnavailable(f"{given.name} holds no {CONV_FILE}: {error}") from error
        file = cache / CONV_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if not file.is_file():
        raise PeerUnavailable(f"{given} holds no {CONV_FILE}; tested with sglang {TESTED_VERSION}")
    name = "bole_peer_sglang_conv"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PeerUnavailable(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    with _in_sys_modules(_stand_ins()):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise PeerUnavailable(f"sglang's convolution does not load: {type(error).__name__}: {error}") from error
    entry = getattr(module, ENTRY, None)
    if entry is None:
        raise PeerUnavailable(f"{file} has no {ENTRY}; tested with sglang {TESTED_VERSION}")
    return entry


def links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first child and next sibling of every node, int32 [B, N], -1 for none: SGLang's form of a tree.

    Args:
        parents: int [B, N], node 0 the only root.
    """
    rows = parents.tolist()
    child = [[-1] * len(row) for row in rows]
    sibling = [[-1] * len(row) for row in rows]
    for b, row in enumerate(rows):
        last: dict[int, int] = {}
        for i, p in enumerate(row[1:], 1):
            if p in last:
                sibling[b][last[p]] = i
            else:
                child[b][p] = i
            last[p] = i
    return tuple(torch.tensor(t, dtype=torch.int32, device=parents.device) for t in (child, sibling))  # type: ignore[return-value]


class ConvPeer:
    """One layer's call. The state pool is its own: the kernel shifts the nodes into it."""

    def __init__(
        self,
        entry: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        parents: torch.Tensor,
    ) -> None:
        """Prepare a call.

        Args:
            entry: from :func:`load_conv`.
            x: [B, N, C].
            weight: [C, W].
            state: pool [slots, C, W - 1]; copied.
            slots: int32 [B].
            parents: int [B, N], node 0 the only root.
        """
        batch, nodes, channels = x.shape
        # Channels contiguous, as its own checks want.
        self.state = state.transpose(1, 2).contiguous().transpose(1, 2)
        child, sibling = links(parents)
        self.arguments: dict[str, Any] = {
            "x": x.transpose(1, 2),
            "conv_state": self.state,
            "weight": weight,
            "activation": "silu",
            "conv_state_indices": slots,
            "intermediate_conv_window": x.new_zeros(batch, nodes, channels, weight.shape[1] - 1),
            "intermediate_state_indices": torch.arange(batch, dtype=torch.int32, device=x.device),
            "retrieve_next_token": child,
            "retrieve_next_sibling": sibling,
            "retrieve_parent_token": torch.zeros_like(child),
        }
        self.entry = entry

    def __call__(self) -> torch.Tensor:
        """Enqueue the call; returns its output, [B, N, C]."""
        return self.entry(**self.arguments).transpose(1, 2)
