"""Stand-ins for SGLang's objects around a target verification, and its token-by-token semantics as plain loops."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, Protocol

import torch

NODES = 5
#: Node 0 is the root with children 1 and 2; 3 is below 1, 4 below 2. And as SGLang links them.
TREE = (-1, 0, 0, 1, 2)
CHAIN = (-1, 0, 1, 2, 3)
CHILD, SIBLING = (1, 3, 4, -1, -1), (-1, 2, -1, -1, -1)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the engine's own path ran")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """``MambaPool.State``."""

    conv: list[torch.Tensor]
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None = None
    intermediate_conv_window: list[torch.Tensor] = dataclasses.field(default_factory=list)


#: SGLang's numbers of the two recurrent layers.
LAYER_IDS = (3, 7)


def make_backend(temporal: torch.Tensor, conv: torch.Tensor) -> Any:
    """An attention backend over pools of two layers."""
    cache = Cache(conv=[conv], temporal=temporal)
    pool = SimpleNamespace(
        mamba_pool=SimpleNamespace(mamba_cache=cache), size=2, mamba_map={id: n for n, id in enumerate(LAYER_IDS)}
    )
    return SimpleNamespace(
        req_to_token_pool=pool, state_indices_list=[], forward_metadata=None, _translate_mamba_indices=lambda x: x
    )


def make_batch(backend: Any, slots: torch.Tensor, shape: str, nodes: int = NODES) -> Any:
    """A forward batch of a target verification; its metadata goes to the backend."""
    rows = slots.shape[0]
    links = [torch.tensor([ids] * rows, dtype=torch.int32) if shape == "tree" else None for ids in (CHILD, SIBLING)]
    backend.forward_metadata = SimpleNamespace(
        mamba_cache_indices=slots, retrieve_next_token=links[0], retrieve_next_sibling=links[1], num_decodes=rows
    )
    steps = 2 if shape == "tree" else nodes - 1
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(draft_token_num=nodes, spec_steps=steps),
    )


class Step(Protocol):
    """One token of a layer."""

    def __call__(
        self, state: torch.Tensor, mixed: torch.Tensor, b: int, node: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def walk(
    state: torch.Tensor, window: torch.Tensor, raw: torch.Tensor, parents: tuple[int, ...], slots: list[int],
    weight: torch.Tensor, bias: torch.Tensor | None, step: Step,
) -> tuple[torch.Tensor, list[list[torch.Tensor]], list[list[torch.Tensor]]]:  # fmt: skip
    """Go through every live row's nodes in fp64, each after its parent.

    Args:
        state: [slots, ...].
        window: [slots, C, W - 1].
        raw: [rows, nodes, C].
        parents: of the nodes.
        slots: of the rows; rows of -1 give zeros.
        weight: [C, W].
        bias: [C] or None.
        step: the recurrence.

    Returns:
        Outputs [rows, nodes, ...], and of each row the states and windows after every node.
    """
    outs, states, windows = [], [], []
    for b, slot in enumerate(slots):
        after: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for node, parent in enumerate(parents):
            above = (state[slot].double(), window[slot].double()) if parent < 0 else after[parent][:2]
            inputs = torch.cat([above[1], raw[b, node].double()[:, None]], dim=1)
            sums = (inputs * weight.double()).sum(1) + (0 if bias is None else bias.double())
            new, out = step(above[0], torch.nn.functional.silu(sums), b, node)
            after.append((new, inputs[:, 1:], out if slot >= 0 else torch.zeros_like(out)))
        outs.append(torch.stack([out for *_, out in after]))
        states.append([new for new, *_ in after])
        windows.append([kept for _, kept, _ in after])
    return torch.stack(outs), states, windows


def delta_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of ``fused_sigmoid_gating_delta_rule_update_kernel``.

    Args:
        state: [HV, dv, dk].
        q: [HK, dk].
        k: [HK, dk].
        v: [HV, dv].
        g: log-decay [HV, dk] or [HV, 1].
        beta: [HV].
    """
    new, outs = state.clone(), []
    for head in range(v.shape[0]):
        group = head // (v.shape[0] // k.shape[0])
        q_h = q[group] / (q[group] @ q[group] + 1e-6).sqrt() * q.shape[-1] ** -0.5
        k_h = k[group] / (k[group] @ k[group] + 1e-6).sqrt()
        decayed = state[head] * g[head].exp()
        new[head] = decayed + torch.outer(beta[head] * (v[head] - decayed @ k_h), k_h)
        outs.append(new[head] @ q_h)
    return new, torch.stack(outs)
