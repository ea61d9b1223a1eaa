"""Random problems on generated kernels, against the float64 recurrence; other ones in every run."""

from __future__ import annotations

import os

import pytest
from bole_testing.cases.draws import draws, run_draw
from bole_testing.gpu_plan import RANDOM, RandomClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.parametrize("kind", RANDOM, ids=str)
def test_random(kind: RandomClass) -> None:
    number = int(os.environ["BOLE_SEED"])
    print(f"BOLE_SEED={number}")
    strategy = draws(
        kind.max_nodes, 4, heads=[kind.heads], dims=[kind.dims], modes=[kind.mode], pending=[kind.pending],
        capture=[kind.capture], full=True,
    )  # fmt: skip

    # Half of the time goes to the recurrence, node by node: fewer draws of large trees.
    @seed(number)
    @settings(
        max_examples=max(4, 400 // kind.max_nodes),
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy, st.just(kind.setting.setup("cuda")))
    def body(draw, setup) -> None:
        run_draw(setup, draw)

    body()
