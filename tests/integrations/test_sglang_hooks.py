"""The hooks, called as SGLang calls them, on stand-ins with the attributes that the seams name."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bole_testing.close import assert_close, assert_same_bits

from bole_runtime import TreeBatch, commit, conv_commit, tree_conv, verify
from bole_runtime.integrations.sglang import gdn, memory, served
from bole_runtime.integrations.sglang.hooks import hooks
from bole_runtime.integrations.sglang.seams import CHANGED

LAYERS, SLOTS, NODES, HK, HV, D, W = 2, 6, 5, 1, 2, 8, 4
CHANNELS = (2 * HK + HV) * D


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the engine's own path ran")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cache:
    conv: list[torch.Tensor]
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None = None
    intermediate_conv_window: list[torch.Tensor] = dataclasses.field(default_factory=list)


def make_engine() -> tuple[Any, list[Any]]:
    torch.manual_seed(1)
    cache = _Cache(conv=[torch.randn(LAYERS, SLOTS, CHANNELS, W - 1)], temporal=torch.randn(LAYERS, SLOTS, HV, D, D))
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache), size=2, mamba_map={3: 0, 7: 1})
    backend = SimpleNamespace(
        req_to_token_pool=pool, state_indices_list=[], forward_metadata=None, _translate_mamba_indices=lambda x: x
    )
    layers = [
        SimpleNamespace(
            layer_id=number, conv_weights=torch.randn(CHANNELS, W), bias=torch.randn(CHANNELS), activation="silu",
            q_dim=HK * D, k_dim=HK * D, v_dim=HV * D, num_q_heads=HK, num_k_heads=HK, num_v_heads=HV, head_q_dim=D,
            head_k_dim=D, head_v_dim=D, A_log=torch.randn(HV), dt_bias=torch.randn(HV),
        )
        for number in (3, 7)
    ]  # fmt: skip
    return backend, layers


#: Node 0 is the root with children 1 and 2; 3 is below 1, 4 below 2. As SGLang links them.
PARENTS = [-1, 0, 0, 1, 2]
CHILD, SIBLING = [1, 3, 4, -1, -1], [-1, 2, -1, -1, -1]


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("track", [False, True])
def test_a_verification_and_its_commit(shape: str, track: bool) -> None:
    backend, layers = make_engine()
    cache = backend.req_to_token_pool.mamba_pool.mamba_cache
    parents = torch.tensor([PARENTS if shape == "tree" else [-1, 0, 1, 2, 3]] * 2, dtype=torch.int32)
    for turn in range(3):
        slots = torch.tensor([4, -1] if turn == 1 else [4, 2], dtype=torch.int32)
        links = (torch.tensor([CHILD] * 2, dtype=torch.int32), torch.tensor([SIBLING] * 2, dtype=torch.int32))
        backend.forward_metadata = SimpleNamespace(
            mamba_cache_indices=slots,
            retrieve_next_token=links[0] if shape == "tree" else None,
            retrieve_next_sibling=links[1] if shape == "tree" else None,
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            spec_info=SimpleNamespace(draft_token_num=NODES, spec_steps=2 if shape == "tree" else NODES - 1),
        )
        live = 1 if turn == 1 else 2
        accepted, steps = torch.tensor([3, 0][:live]), torch.tensor([1, -1][:live])
        full = torch.tensor([*accepted.tolist(), -1, -1][:2])
        want = []
        for n, layer in enumerate(layers):
            mixed = torch.randn(2 * NODES, CHANNELS + 3)[:, :CHANNELS]  # columns of a wider projection
            a, b = torch.randn(2 * NODES, HV), torch.randn(2 * NODES, 2 * HV)[:, HV:]
            tree = TreeBatch.from_parents(parents)
            state, window = cache.temporal[n].clone(), cache.conv[0][n].clone()
            x, inputs = tree_conv(
                mixed.unflatten(0, (2, NODES)), layer.conv_weights, layer.bias, state=window, slots=slots, tree=tree
            )
            q, k, v = (t.unflatten(-1, (-1, D)) for t in x.split((HK * D, HK * D, HV * D), dim=-1))
            gates = {"a": a.unflatten(0, (2, NODES)), "b": b.unflatten(0, (2, NODES)), "A_log": layer.A_log}
            gates["dt_bias"] = layer.dt_bias
            out, factors = verify(q, k, v, gates=gates, state=state, slots=slots, tree=tree)
            copied = state.clone(), window.clone()
            commit(copied[0], slots, factors, torch.tensor([1, -1]))
            conv_commit(copied[1], slots, inputs, torch.tensor([1, -1]))
            commit(state, slots, factors, full)
            conv_commit(window, slots, inputs, full)
            if track:
                state[0], window[0] = copied[0][4], copied[1][4]
            want.append((state, window))
            got = gdn.forward_extend(
                _refuse,
                backend,
                layer=layer,
                forward_batch=batch,
                mixed_qkv=mixed,
                a=a,
                b=b,
                q=None,
                save_kv_cache=True,
            )
            assert got.shape == (1, 2 * NODES, HV, D)
            assert_close("output", got[0].unflatten(0, (2, NODES))[:live], out[:live].double(), 1e-6)
        hybrid = SimpleNamespace(linear_attn_backend=backend)
        gdn.commit(
            _refuse, hybrid, last_correct_step_indices=accepted, model=None,
            mamba_track_indices=torch.tensor([0, 1][:live]) if track else None,
            mamba_steps_to_track=steps if track else None,
        )  # fmt: skip
        for n, (state, window) in enumerate(want):
            assert_close("states", cache.temporal[n], state.double(), 1e-6)
            assert_same_bits("windows", cache.conv[0][n], window)


def test_everything_else_is_the_engine_s_own() -> None:
    backend, layers = make_engine()
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    seen: list[Any] = []
    x = torch.zeros(1)
    assert gdn.forward_extend(lambda *a, **k: seen.append((a, k)), backend, layers[0], batch, x, x, x, q=None) is None
    assert seen[0][1] == {"q": None}
    # Nothing was verified: a commit is not Bole's either.
    hybrid = SimpleNamespace(linear_attn_backend=backend)
    assert gdn.commit(lambda *a, **k: "own", hybrid, last_correct_step_indices=x) == "own"


def test_hooks_cover_the_seams() -> None:
    assert tuple(hooks()) == CHANGED


@pytest.fixture
def model_kinds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for SGLang's modules that say what kind a model is."""
    kinds = SimpleNamespace(gdn=True, recurrent=True)
    module = ModuleType("sglang.srt.configs.hybrid_arch")
    module.hybrid_gdn_config = lambda config: config if kinds.gdn else None  # type: ignore[attr-defined]
    module.mambaish_config = lambda config: config if kinds.recurrent else None  # type: ignore[attr-defined]
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(_patched={s.target for s in CHANGED})  # type: ignore[attr-defined]
    for made in (module, registry):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("sglang", "sglang.srt", "sglang.srt.configs", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(served, "_decided", None)
    kinds.registry = registry
    return kinds


def test_models_that_are_not_served_stop_the_engine(model_kinds: SimpleNamespace) -> None:
    model_kinds.gdn = False
    with pytest.raises(served.NotServed, match=r"serves Gated DeltaNet models.*Unset BOLE_SGLANG"):
        served.served(SimpleNamespace())
    model_kinds.recurrent = False
    assert served.served(SimpleNamespace()) is False  # a model without recurrent layers: nothing to do


def test_hooks_that_sglang_could_not_set_stop_the_engine(model_kinds: SimpleNamespace) -> None:
    model_kinds.registry.HookRegistry._patched.discard(CHANGED[1].target)
    with pytest.raises(served.NotServed, match="update_mamba_state_after_mtp_verify"):
        served.served(SimpleNamespace())


def _params() -> SimpleNamespace:
    shape = SimpleNamespace(temporal=(32, 128, 128), conv=[(8192, 3)])
    return SimpleNamespace(
        shape=shape, dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        mamba_cache_per_req=24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    )  # fmt: skip


def test_a_node_s_share_bounds_its_factors() -> None:
    # Qwen3.5-9B: 12.3 KB of factors and 16 KB of raw inputs a node and layer, of 2.05 MiB a request and layer.
    share = memory.node_share(_params())
    assert (12_288 + 256 + 16_384) / (2 * 2**20 + 49_152) < share < 0.016


def _configurator(version: str) -> tuple[Any, Any]:
    arguments = SimpleNamespace(speculative_num_draft_tokens=16, max_running_requests=32, pp_size=1)
    module = ModuleType(f"configurator_{version}")
    if version == "context":
        module.get_spec = lambda: arguments  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    kind = type("KVCacheConfigurator", (), {"__module__": module.__name__})
    made: Any = kind()
    made.server_args, made.model_config = arguments, SimpleNamespace()
    made.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    made.mambaish_config = SimpleNamespace(mamba2_cache_params=_params())
    return made, module


@pytest.mark.parametrize("version", ["arguments", "context"])
def test_the_engine_reserves_factors(version: str, model_kinds: SimpleNamespace) -> None:
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


def test_pipeline_parallelism_is_refused(model_kinds: SimpleNamespace) -> None:
    made, _ = _configurator("arguments")
    made.server_args.pp_size = 2
    with pytest.raises(served.NotServed, match="pipeline parallelism"):
        memory.reserve(_refuse, made, 1.0)


def test_pools_hold_no_snapshots(model_kinds: SimpleNamespace) -> None:
    class Pool:
        pass

    def original(pool: Any, *, spec_state_size: int, speculative_num_draft_tokens: int | None, **more: Any) -> None:
        pool.given = (spec_state_size, speculative_num_draft_tokens)
        count = speculative_num_draft_tokens or 0
        pool._intermediate_conv_window_phys = [torch.zeros(1)]
        pool.mamba_cache = _Cache(
            conv=[torch.zeros(2, 4, 8, 3)], temporal=torch.zeros(2, 4, 2, 4, 4),
            intermediate_ssm=torch.zeros(2, spec_state_size + 1, count, 2, 4, 4),
            intermediate_conv_window=[torch.zeros(2, spec_state_size + 1, count, 8, 3)],
        )  # fmt: skip

    sizes: dict[str, Any] = {"size": 3, "spec_state_size": 3, "speculative_num_draft_tokens": 16}
    pool: Any = Pool()
    memory.pool_init(original, pool, **sizes)  # not decided: another kind of model
    assert pool.given == (3, 16)
    assert pool.mamba_cache.intermediate_ssm is not None
    served.served(SimpleNamespace())
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
