"""What the budget needs of SGLang, beside the seams of every verification; checked where it is switched on."""

from __future__ import annotations

from bole_runtime.integrations.sglang.seams import Seam

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_STATE = "sglang.srt.speculative.adaptive_runtime_state"
_RUNNER = "sglang.srt.model_executor.runner"
_BOTH = ("speculative_num_steps", "speculative_num_draft_tokens")

WORKER = Seam(
    _WORKER,
    "EAGLEWorkerV2.__init__",
    ("server_args", "target_worker"),
    ("adaptive_controller", "_target_worker", "_draft_worker", "topk", "page_size", "speculative_algorithm", *_BOTH),
    "with `BOLE_SGLANG_BUDGET`: puts Bole's controller where SGLang has that of adaptive speculation",
)
ROUND = Seam(
    _WORKER,
    "EAGLEWorkerV2.forward_batch_generation",
    ("batch",),
    ("is_extend", "is_extend_in_batch", "activate_step_by_batch", "seq_lens", "draft", "verify"),
    "with `BOLE_SGLANG_BUDGET`: times rounds, and reads what the drafter expected",
)
DRAFTED = Seam(
    "sglang.srt.speculative.eagle_utils",
    "organize_draft_results",
    ("score_list", "token_list", "parents_list", "num_draft_token"),
    ("topk",),
    "with `BOLE_SGLANG_BUDGET`: sums the drafter's probabilities for every number of draft tokens",
)
BUDGET_CHANGED = (WORKER, ROUND, DRAFTED)
BUDGET_READ = (
    Seam(
        _WORKER,
        "EAGLEWorkerV2.init_cuda_graphs",
        (),
        ("adaptive_controller", "register", "init_states", "cuda_graph_bs_decode"),
    ),
    Seam(_WORKER, "EAGLEWorkerV2.activate_step_by_batch", ("batch_size",), ("adaptive_controller",)),
    Seam(
        _WORKER,
        "EAGLEWorkerV2.on_verify_complete_cpu",
        ("num_correct_drafts_per_req", "batch_size"),
        ("adaptive_controller", "on_verify_complete"),
    ),
    Seam(
        _WORKER,
        "EAGLEWorkerV2.build_adaptive_runtime_state",
        (*_BOTH, "cuda_graph_bs"),
        # An attention backend of its own, so an EngineRounds of its own; and graphs of its own.
        (
            "_override_worker_state", "init_attention_backend", "_capture_cuda_graphs", "_get_attention_backend",
            "SpecRuntimeState", "target_graph_runner",
        ),
    ),
    Seam(
        _WORKER,
        "EAGLEWorkerV2.apply_runtime_state",
        ("state",),
        (
            *_BOTH, "draft_attn_backend", "cuda_graph_runner", "draft_extend_attn_backend", "attn_backend",
            "cuda_graph_runner_for_draft_extend", "decode_cuda_graph_runner", "override",
        ),
    ),
    Seam(_WORKER, "EagleDraftWorker.draft_forward", ("forward_batch",), ("organize_draft_results", _BOTH[1])),
    Seam(_WORKER, "EagleDraftWorker.draft", ("batch",), ("build_eagle_verify_input", *_BOTH)),
    Seam(_STATE, "SpecRuntimeState", (), _BOTH),
    Seam(_STATE, "AdaptiveController.register", ("state", "steps")),
    Seam(_STATE, "AdaptiveController.init_states", ("cuda_graph_bs",), ("build_adaptive_runtime_state",)),
    Seam(_STATE, "AdaptiveController.activate_step_by_batch", ("batch_size",)),
    Seam(_STATE, "AdaptiveController.on_verify_complete", ("num_correct_drafts_per_req", "batch_size")),
    Seam(f"{_RUNNER}.decode_cuda_graph_runner", "DecodeCudaGraphRunner.__init__", (), ("capture_bs",)),
    # A result carries its own number of draft tokens: it is read when the next number may already have been chosen.
    Seam("sglang.srt.speculative.eagle_worker_common", "run_eagle_verify", ("num_draft_tokens",), (_BOTH[1],)),
    Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        ("result", "batch"),
        ("on_verify_complete_cpu", "accept_lens"),
    ),
    # Keys and values are reserved for the largest number, whatever the current one is.
    Seam(
        "sglang.srt.mem_cache.allocation_sizing",
        "get_alloc_len_per_decode",
        (),
        ("max_speculative_num_draft_tokens",),
    ),
)  # fmt: skip
