"""The hooks, called as SGLang calls them, on stand-ins with the attributes that the seams name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bole_testing.sglang import Cache, refuse

from bole_runtime.integrations.sglang import memory, served
from bole_runtime.integrations.sglang.hooks import hooks
from bole_runtime.integrations.sglang.seams import CHANGED, COMMIT


def test_hooks_cover_the_seams() -> None:
    assert tuple(hooks()) == CHANGED


#: What SGLang's hybrid_arch says of configurations: function to names.
KINDS = {
    "hybrid_gdn_config": ("Qwen3_5Config", "JetNemotronConfig", "Qwen4ExpTextConfig"),
    "mamba2_config": (
        "NemotronHConfig",
        "NemotronHPuzzleConfig",
        "FalconH1Config",
        "GraniteMoeHybridConfig",
        "Lfm2Config",
    ),
    "kimi_linear_config": ("KimiLinearConfig",),
    "hybrid_lightning_config": ("BailingHybridConfig",),
}


def config(name: str) -> Any:
    bases = (type("NemotronHConfig", (), {}),) if name == "NemotronHPuzzleConfig" else ()
    return type(name, bases, {})()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for SGLang's modules that say what kind a model is, and which hooks are set; returns the second."""
    module = ModuleType("sglang.srt.configs.hybrid_arch")
    for function, names in KINDS.items():
        setattr(module, function, lambda c, names=names: c if type(c).__name__ in names else None)
    known = [name for names in KINDS.values() for name in names] + ["Glm5NextTextConfig"]
    module.mambaish_config = lambda c: c if type(c).__name__ in known else None  # type: ignore[attr-defined]
    made = ModuleType("sglang.srt.plugins.hook_registry")
    made.HookRegistry = SimpleNamespace(_patched={s.target for s in CHANGED})  # type: ignore[attr-defined]
    for one in (module, made):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    for name in ("sglang", "sglang.srt", "sglang.srt.configs", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(served, "_decided", None)
    return made


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen3_5Config", "gdn"),
        ("KimiLinearConfig", "kda"),
        ("NemotronHConfig", "mamba2"),
        ("NemotronHPuzzleConfig", "mamba2"),
        ("FalconH1Config", "mamba2"),
        ("GraniteMoeHybridConfig", "mamba2"),
        ("LlamaConfig", None),  # no recurrent layers: nothing to do
    ],
)
def test_the_model_decides_the_family(name: str, family: str | None, registry: Any) -> None:
    assert served.family_of(config(name)) == family
    assert served.served(config(name)) is (family is not None)
    assert served.served() is (family is not None)


@pytest.mark.parametrize("name", ["JetNemotronConfig", "Qwen4ExpTextConfig", "Lfm2Config", "BailingHybridConfig"])
def test_models_that_are_not_served_stop_the_engine(name: str, registry: Any) -> None:
    with pytest.raises(
        served.NotServed, match=rf"serves Gated DeltaNet .*KDA.*Mamba2.* has a {name}\. Unset BOLE_SGLANG"
    ):
        served.served(config(name))


def test_kda_layers_of_other_models(registry: Any) -> None:
    with pytest.raises(served.NotServed, match="Glm5NextTextConfig"):  # 0.5.16 has no such models
        served.family_of(config("Glm5NextTextConfig"))
    kinds: Any = sys.modules["sglang.srt.configs.hybrid_arch"]
    kinds.hybrid_kda_config = lambda c: c if "Glm5" in type(c).__name__ else None
    assert served.family_of(config("Glm5NextTextConfig")) == "kda"


def test_hooks_that_sglang_could_not_set_stop_the_engine(registry: Any) -> None:
    registry.HookRegistry._patched.discard(COMMIT.target)
    with pytest.raises(served.NotServed, match="update_mamba_state_after_mtp_verify"):
        served.served(config("Qwen3_5Config"))


def _params(conv: tuple[int, int] = (8192, 3), kda: bool = False) -> SimpleNamespace:
    shape = SimpleNamespace(temporal=(32, 128, 128), conv=[conv])
    return SimpleNamespace(
        shape=shape, is_kda=kda, dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        mamba_cache_per_req=24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    )  # fmt: skip


def test_a_node_s_share_bounds_its_factors() -> None:
    # Qwen3.5-9B: 12.3 KB of factors and 16 KB of raw inputs a node and layer, of 2.05 MiB a request and layer.
    share = memory.node_share(_params())
    assert (12_288 + 256 + 16_384) / (2 * 2**20 + 49_152) < share < 0.016
    # Kimi Linear: 16 KB of k and v, 16.5 KB of gates in fp32, 24 KB of raw inputs.
    share = memory.node_share(_params((3, 12_288), kda=True))
    assert (16_384 + 16_512 + 24_576) / (2 * 2**20 + 73_728) < share < 0.031


def _configurator(version: str) -> tuple[Any, Any]:
    arguments = SimpleNamespace(speculative_num_draft_tokens=16, max_running_requests=32, pp_size=1)
    module = ModuleType(f"configurator_{version}")
    if version == "context":
        module.get_spec = lambda: arguments  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    kind = type("KVCacheConfigurator", (), {"__module__": module.__name__})
    made: Any = kind()
    made.server_args, made.model_config = arguments, config("Qwen3_5Config")
    made.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    made.mambaish_config = SimpleNamespace(mamba2_cache_params=_params())
    return made, module


@pytest.mark.parametrize("version", ["arguments", "context"])
def test_the_engine_reserves_factors(version: str, registry: Any) -> None:
    made, module = _configurator(version)

    def original(configurator: Any, rest: float) -> float:
        source = module.get_spec() if version == "context" else configurator.server_args
        source.max_mamba_cache_size = 40  # it notes sizes there
        assert source.max_running_requests == 32
        per_request = configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req
        return rest - 32 * source.speculative_num_draft_tokens * per_request / 2**30

    own = original(made, 100.0)
    left = memory.reserve(original, made, 100.0)
    assert 100 - own > 24
    assert 0.2 < 100 - left < 0.4  # 32 requests, 16 nodes, 24 layers, 28.9 KB: 0.33 GB
    assert made.server_args.speculative_num_draft_tokens == 16
    assert made.server_args.max_mamba_cache_size == 40
    made.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    assert memory.reserve(original, made, 100.0) == own


def test_pipeline_parallelism_isrefused(registry: Any) -> None:
    made, _ = _configurator("arguments")
    made.server_args.pp_size = 2
    with pytest.raises(served.NotServed, match="pipeline parallelism"):
        memory.reserve(refuse, made, 1.0)


def test_pools_hold_no_snapshots(registry: Any) -> None:
    class Pool:
        pass

    def original(pool: Any, *, spec_state_size: int, speculative_num_draft_tokens: int | None, **more: Any) -> None:
        pool.given = (spec_state_size, speculative_num_draft_tokens)
        count = speculative_num_draft_tokens or 0
        pool._intermediate_conv_window_phys = [torch.zeros(1)]
        pool.mamba_cache = Cache(
            conv=[torch.zeros(2, 4, 8, 3)], temporal=torch.zeros(2, 4, 2, 4, 4),
            intermediate_ssm=torch.zeros(2, spec_state_size + 1, count, 2, 4, 4),
            intermediate_conv_window=[torch.zeros(2, spec_state_size + 1, count, 8, 3)],
        )  # fmt: skip

    sizes: dict[str, Any] = {"size": 3, "spec_state_size": 3, "speculative_num_draft_tokens": 16}
    pool: Any = Pool()
    memory.pool_init(original, pool, **sizes)  # not decided: another kind of model
    assert pool.given == (3, 16)
    assert pool.mamba_cache.intermediate_ssm is not None
    served.served(config("Qwen3_5Config"))
    pool = Pool()
    memory.pool_init(original, pool, **sizes)
    assert pool.given == (0, 1)
    assert pool.mamba_cache.intermediate_ssm is None
    assert pool.mamba_cache.intermediate_conv_window == []
    assert pool.mamba_cache.temporal.shape == (2, 4, 2, 4, 4)
    pool = Pool()
    memory.pool_init(original, pool, **{**sizes, "speculative_num_draft_tokens": None})
    assert pool.given == (3, None)
    with pytest.raises(served.NotServed, match="enable_linear_replayssm"):
        memory.pool_init(original, Pool(), enable_linear_replayssm=True, **sizes)
