"""A layer's front end, R and pass over the state: three launches from the outputs of its projections."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import DeviceType

from bole_runtime import TreeBatch, tree_conv, verify

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]

BATCH, NODES, DK = 8, 16, 128
#: Family, key heads, value heads, value dim, per-node gates (of a value head, or of each of its key channels).
LAYERS = {
    "gdn": (16, 32, 128, {"a": False, "b": False}),
    "kda": (32, 32, 128, {"f": True, "b": False}),
    "mamba2": (8, 128, 64, {"dt_raw": False}),
}


def launches(call: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that a call launches."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_three_launches_from_its_packed_projections(name: str) -> None:
    hk, hv, dv, node_gates = LAYERS[name]
    at = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = (hk * DK, hk * DK, hv * dv)
    channels = sum(sizes)
    parents = [-1, *((i - 1) // 2 for i in range(1, NODES))]
    tree = TreeBatch.from_parents(torch.tensor([parents] * BATCH, device="cuda"))
    # Columns of one projection: what is convolved, a gate of the output beside it, and the inputs of the gates.
    packed = torch.randn(BATCH, NODES, channels + hv * dv, **at)
    widths = [hv * DK if wide else hv for wide in node_gates.values()]
    given = torch.randn(BATCH, NODES, sum(widths), **at).split(widths, -1)
    gates = {
        g: t.unflatten(-1, (hv, DK)) if wide else t for (g, wide), t in zip(node_gates.items(), given, strict=True)
    }
    vector = {"A_log": torch.randn(hv, device="cuda")}
    vector["dt_bias"] = torch.randn(hv, DK, device="cuda") if name == "kda" else torch.randn(hv, device="cuda")
    if name == "mamba2":
        vector["D"] = torch.randn(hv, device="cuda")
    weight, conv_state = torch.randn(channels, 4, **at), torch.randn(BATCH, channels, 3, **at)
    state = torch.randn(BATCH, hv, dv, DK, device="cuda")
    slots = torch.arange(BATCH, device="cuda", dtype=torch.int32)

    def layer() -> None:
        x, _ = tree_conv(packed[..., :channels], weight, state=conv_state, slots=slots, tree=tree)
        q, k, v = x.split(sizes, -1)
        heads = q.unflatten(-1, (hk, DK)), k.unflatten(-1, (hk, DK)), v.unflatten(-1, (hv, dv))
        verify(*heads, gates={**gates, **vector}, state=state, slots=slots, tree=tree, recurrence=name)

    # Scratch memory is filled before each call of a test, so that what was not written shows.
    names = [n for n in launches(layer) if "FillFunctor" not in n]
    assert 2 <= len(names) <= 3, names
    assert all(n.startswith(("tree_conv", name)) for n in names), names
