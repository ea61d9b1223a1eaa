"""Families against the layers of released models as transformers has them, on the CPU, from the raw gate inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from bole_testing.close import assert_close

from bole_runtime import TreeBatch, commit, set_backend, verify
from bole_runtime.families import lightning_log_decay
from bole_runtime.reference import verify_sequential

pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")

BATCH, TOKENS = 2, 11
#: The models' own code computes in float32, in chunks.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def _torch_backend() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_backend("torch")
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    set_backend(None)
    torch.set_num_threads(threads)


def model_code(name: str) -> Any:
    """Return the modeling module of a model, or skip where this transformers does not have it."""
    try:
        return import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError:
        pytest.skip(f"this version of transformers has no {name}")


def made(code: Any, config: str, layer: str, fields: dict[str, Any], **arguments: Any) -> Any:
    """Build a layer with random weights of a size at which every term matters."""
    module = getattr(code, layer)(getattr(code, config)(**fields), **arguments)
    for name, p in module.named_parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.dim() > 1 else 0.3) + (1.0 if "norm" in name else 0.0))
    return module.eval()


def recorded(monkeypatch: pytest.MonkeyPatch, code: Any, name: str, **forced: Any) -> list[tuple[tuple, dict, Any]]:
    """Replace a function of the model's code by one that records arguments and result."""
    function, calls = getattr(code, name), []

    def record(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **{**kwargs, **forced})
        calls.append((args, kwargs, result))
        return result if "return_final_states" not in forced else result[0]

    monkeypatch.setattr(code, name, record)
    return calls


def outputs_of(module: torch.nn.Module, *names: str) -> dict[str, torch.Tensor]:
    """Return a dict that the outputs of some submodules are put into."""
    seen: dict[str, torch.Tensor] = {}
    for name in names:
        keep: Callable[..., None] = lambda _m, _i, out, name=name: seen.__setitem__(name, out)  # noqa: E731
        module.get_submodule(name).register_forward_hook(keep)
    return seen


def check_layer(
    family: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: dict[str, Any], out: torch.Tensor,
    state: torch.Tensor | None,
) -> None:  # fmt: skip
    """Verify the tokens as a chain and commit them; compare with a layer's output and its state [B, HV, dv, dk]."""
    pool = torch.zeros(BATCH, v.shape[2], v.shape[3], k.shape[3])
    slots = torch.arange(BATCH)
    tree = TreeBatch.chain(BATCH, TOKENS)
    # The models' convolutions leave their outputs transposed.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    got, factors = verify(q, k, v, gates=gates, state=pool, slots=slots, tree=tree, recurrence=family)
    exact = verify_sequential(q, k, v, gates=gates, state=pool, slots=slots, tree=tree, recurrence=family)
    assert out.norm() > 0.1
    assert_close("output", got, out.float(), BOUND)
    assert_close("reference", exact, out.float(), BOUND)
    commit(pool, slots, factors, torch.full((BATCH,), TOKENS - 1))
    if state is not None:
        assert_close("state", pool, state.float(), BOUND)


GDN = {
    "hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "prefix", "layer", "projections", "fields", "beta_scale"),
    [
        ("qwen3_next", "Qwen3Next", "GatedDeltaNet", (), {}, 1.0),
        ("qwen3_5", "Qwen3_5Text", "Qwen3_5GatedDeltaNet", ("in_proj_a", "in_proj_b"), {}, 1.0),
        (
            "olmo_hybrid", "OlmoHybrid", "GatedDeltaNet", ("a_proj", "b_proj"),
            {"linear_num_value_heads": 2, "linear_allow_neg_eigval": True}, 2.0,
        ),
    ],
    ids=["qwen3-next", "qwen3.5", "olmo-hybrid"],
)  # fmt: skip
def test_gated_deltanet(
    monkeypatch: pytest.MonkeyPatch, name: str, prefix: str, layer: str, projections: tuple[str, ...],
    fields: dict[str, Any], beta_scale: float,
) -> None:  # fmt: skip
    code = model_code(name)
    layer = layer if layer.startswith("Qwen") else prefix + layer
    module = made(code, f"{prefix}Config", layer, {**GDN, **fields}, layer_idx=0)
    calls = recorded(monkeypatch, code, "torch_chunk_gated_delta_rule", output_final_state=True)
    raw: dict[str, torch.Tensor] = {}
    if projections:
        seen = outputs_of(module, *projections)
    else:
        split = module.fix_query_key_value_ordering

        def ordering(*args: Any) -> Any:
            result = split(*args)
            raw["b"], raw["a"] = result[-2:]
            return result

        monkeypatch.setattr(module, "fix_query_key_value_ordering", ordering)
    module(torch.randn(BATCH, TOKENS, 32))
    if projections:
        raw = {"a": seen[projections[0]], "b": seen[projections[1]]}
    (q, k, v), _, (out, state) = calls[0]
    gates = {**raw, "A_log": module.A_log, "dt_bias": module.dt_bias, "beta_scale": beta_scale}
    check_layer("gdn", q, k, v, gates, out, state.transpose(-1, -2))


KDA = {
    "hidden_size": 32, "linear_num_heads": 3, "linear_head_dim": 12, "num_hidden_layers": 2, "vocab_size": 32,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "layer", "f", "fields"),
    [
        ("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention", "forget_gate.f_b_proj", {}),
        (
            "glm5_next", "Glm5NextTextConfig", "Glm5NextTextLinearAttention", "forget_gate.f_b_proj",
            {"linear_lower_bound": -5.0},
        ),
        (
            "bailing_hybrid", "BailingHybridConfig", "BailingHybridDeltaAttention", "forget_gate.f_proj",
            {"kda_safe_gate": True, "kda_lower_bound": -5.0},
        ),
    ],
    ids=["kimi-linear", "glm-5.3", "ling-3.0"],
)  # fmt: skip
def test_kimi_delta_attention(
    monkeypatch: pytest.MonkeyPatch, name: str, config: str, layer: str, f: str, fields: dict[str, Any]
) -> None:
    code = model_code(name)
    module = made(code, config, layer, {**KDA, **fields}, layer_idx=0)
    calls = recorded(monkeypatch, code, "chunk_kimi_delta_attention", output_final_state=True)
    seen = outputs_of(module, f, "b_proj")
    module(torch.randn(BATCH, TOKENS, 32))
    (q, k, v), _, (out, state) = calls[0]
    gate = module.forget_gate
    gates = {
        "f": seen[f].reshape(k.shape),
        "b": seen["b_proj"],
        "A_log": gate.A_log.flatten(),
        "dt_bias": gate.dt_bias.view(3, 12),
        "lower_bound": -5.0 if fields else 0.0,
    }
    check_layer("kda", q, k, v, gates, out, state.transpose(-1, -2))


_MAMBA_V1 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 4,
}  # fmt: skip
MAMBA = [
    (
        "mamba2", "Mamba2Config", "Mamba2Mixer",
        {
            "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 4,
            "time_step_limit": (0.3, 0.9),
        },
    ),
    ("bamba", "BambaConfig", "BambaMixer", _MAMBA_V1),
    ("falcon_h1", "FalconH1Config", "FalconH1Mixer", {**_MAMBA_V1, "mamba_d_ssm": 64}),
    (
        "granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridMambaLayer",
        {**_MAMBA_V1, "layer_types": ["mamba"], "num_hidden_layers": 1},
    ),
    (
        "nemotron_h", "NemotronHConfig", "NemotronHMamba2Mixer",
        {
            "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4,
            "time_step_min": 0.4, "expand": 2,
        },
    ),
    (
        "zamba2", "Zamba2Config", "Zamba2MambaMixer",
        {
            "n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 2, "mamba_expand": 2, "chunk_size": 4,
            "mamba_headdim": 16, "time_step_min": 0.4,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "layer", "fields"), MAMBA, ids=[m[0] for m in MAMBA])
def test_mamba2(monkeypatch: pytest.MonkeyPatch, name: str, config: str, layer: str, fields: dict[str, Any]) -> None:
    code = model_code(name)
    module = made(code, config, layer, {"hidden_size": 32, "vocab_size": 32, **fields}, layer_idx=0)
    if name == "falcon_h1":
        # The model sets it: a multiplier of every projection, dt included.
        module.mup_vector = torch.rand(module.in_proj.out_features) + 0.5
    calls = recorded(monkeypatch, code, "mamba2_chunk_scan", return_final_states=True)
    module(torch.randn(BATCH, TOKENS, 32))
    (x, dt, _, b, c), kwargs, (out, state) = calls[0]
    low, high = kwargs["dt_limit"]
    gates = {
        "dt_raw": dt, "A_log": module.A_log, "dt_bias": module.dt_bias, "D": module.D, "dt_min": low, "dt_max": high,
    }  # fmt: skip
    check_layer("mamba2", c, b, x, gates, out, state)


def test_lightning_attention_of_minimax() -> None:
    code = model_code("minimax")
    fields = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "block_size": 4,
        "num_hidden_layers": 6, "layer_types": ["linear_attention"] * 6, "vocab_size": 32,
    }  # fmt: skip
    module = made(code, "MiniMaxConfig", "MiniMaxLightningAttention", fields, layer_idx=2)
    seen = outputs_of(module, "qkv_proj")
    core: list[torch.Tensor] = []
    module.norm.register_forward_pre_hook(lambda _m, inputs: core.append(inputs[0]))
    module(torch.randn(BATCH, TOKENS, 32), position_embeddings=None, attention_mask=None)
    q, k, v = module.act_fn(seen["qkv_proj"]).reshape(BATCH, TOKENS, 4, 24).split(8, dim=-1)
    slope = module.slope_rate.flatten()
    check_layer("lightning", q, k, v, {"g": -slope}, core[0].reshape(BATCH, TOKENS, 4, 8), None)
    assert_close("log-decay", lightning_log_decay(4, 2, 6), -slope, 1e-5)


@pytest.mark.parametrize(
    ("family", "model", "function"),
    [
        ("gdn", "qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("kda", "kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
def test_branches_continue_from_a_state(family: str, model: str, function: str) -> None:
    # Two branches of one tree equal two runs of the model's own step over prefix and branch.
    step = getattr(model_code(model), function)
    paths = [[0, 1, 2, 3], [0, 1, 4, 5]]
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 1, 2, 1, 4]]))
    q, k, v = torch.randn(1, 6, 2, 12), torch.randn(1, 6, 2, 12), torch.randn(1, 6, 2, 20)
    g = -torch.rand(1, 6, 2, *([12] if family == "kda" else []))
    beta, state = torch.rand(1, 6, 2), torch.randn(1, 2, 20, 12)
    out, _ = verify(
        q, k, v, gates={"g": g, "beta": beta}, state=state, slots=torch.tensor([0]), tree=tree, recurrence=family
    )
    for path in paths:
        own, _ = step(
            q[:, path], k[:, path], v[:, path], g=g[:, path], beta=beta[:, path], use_qk_l2norm_in_kernel=True,
            initial_state=state.transpose(-1, -2).contiguous(), output_final_state=True,
        )  # fmt: skip
        assert_close(f"path {path}", out[:, path], own, BOUND)
