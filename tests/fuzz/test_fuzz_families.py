"""Random operations on states of every family: chains hold gates ready, or as given with parameters of the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from bole_testing.families import draw_input
from bole_testing.serving import Server

from bole_runtime import LayerGeometry, get_family
from bole_runtime.families import FAMILIES

CASES = [(name, mode) for name in FAMILIES for mode in get_family(name).modes]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_random_operations(name: str, mode: str) -> None:
    spec, at = get_family(name), CASES.index((name, mode))
    layer = LayerGeometry(1, 2, 8, 8, recurrence=name, gate_mode=mode)
    fixed = torch.Generator().manual_seed(at)
    heads, dims = (1, 2), (8, 8)
    parameters = {i.name: draw_input(i, mode, (), heads, dims, fixed) for i in spec.parameters(mode)}

    def gates(
        layer: LayerGeometry, normal: Callable[..., torch.Tensor], lead: Sequence[int]
    ) -> Mapping[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(int(normal(1).abs() * 1e6))
        return {i.name: draw_input(i, mode, lead, heads, dims, gen) for i in spec.node_gates(mode)}

    sizes = {"policy": "fused"} if at % 2 else {"policy": "deferred", "pending": 9}
    server = Server(
        at, layers=(layer,), gates=gates, parameters=parameters, state_bound=1e-5, output_bound=2e-5, **sizes
    )
    for _ in range(3):
        server.allocate()
    for n in range(14):
        try:
            server.step()
        except Exception as error:
            raise AssertionError(f"step {n}, {sizes}: {error}") from error
    server.manager.materialise()
    server.check()
    assert server.accepted_tokens > 0
