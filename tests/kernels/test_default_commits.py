"""How commits fold without an entry of a table: token by token, or by a solve where a chain makes that faster."""

from __future__ import annotations

import pytest

from bole_runtime import gpus
from bole_runtime.kernels import Problem, default_config
from bole_runtime.kernels.variants import get_variant

H200 = gpus.get("h200").limits()
FAST = Problem("commit", "gdn", 128, 128, 2, "bf16", "fp32", "ready", "fast", 16, 16, 16, 2048)


@pytest.mark.parametrize("pending", [16, 32, 64])
@pytest.mark.parametrize("work", [1, 32, 1024, 8192])
@pytest.mark.parametrize("changes", [{}, {"state_dtype": "bf16"}, {"in_dtype": "fp16"}, {"dk": 96, "dv": 20}], ids=str)
def test_a_fast_commit_of_a_chain_is_solved_for(changes: dict[str, object], work: int, pending: int) -> None:
    problem = FAST.replace(pending=pending, work=work, **changes)
    config = default_config(problem, H200)
    assert config.variant == "path"
    assert get_variant("commit", "path").reason(problem, config, H200) is None


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({"pending": 0}, "steps"),
        # On keys that nearly repeat a solve is further off than this profile may be.
        ({"precision": "lossless"}, "steps"),
        ({"precision": "lossless", "pending": 64}, "steps"),
        ({"dk": 256}, "steps"),
        # No solve takes a decay a key channel, or rows of their own.
        ({"family": "kda", "group": 1}, "steps"),
        ({"family": "gdn2", "group": 1}, "steps"),
        ({"family": "deltanet"}, "path"),
        # Nothing is solved for.
        ({"family": "mamba2"}, "steps"),
        ({"family": "mamba2", "pending": 32}, "path"),
        ({"family": "mamba2", "pending": 32, "precision": "lossless"}, "path"),
    ],
    ids=str,
)
def test_other_commits(changes: dict[str, object], variant: str) -> None:
    assert default_config(FAST.replace(**changes), H200).variant == variant
