"""Acceptance of proposal trees: which nodes the target model confirms, and the token it adds."""

from __future__ import annotations

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.sampling.calls import AcceptCall
from bole_runtime.sampling.params import SamplingParams
from bole_runtime.sampling.result import Acceptance
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import check_dense, check_index_tensor

METHODS = ("greedy", "sample", "rejection")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def accept(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tree: TreeBatch,
    *,
    method: str = "greedy",
    params: SamplingParams | None = None,
    draft_probs: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    out: Acceptance | None = None,
) -> Acceptance:
    """Walk every tree from its root and accept what keeps the output distributed as the target's.

    The root of a request is its first live node with parent -1, normally node 0: the last token emitted, which is
    always accepted. Other roots are not reachable. At each node the target's logits decide:

    - ``greedy``: the most probable token (lowest id among ties). The walk goes on to the child that holds it (lowest
      index among several), else it stops and emits it.
    - ``sample``: the same with a token drawn from the target distribution under ``params``. The tokens of a request are
      then those that plain decoding with the same seed draws, whatever the tree proposes.
    - ``rejection``: for children drawn from a draft distribution without replacement, in index order. Each child is
      accepted with probability min(1, p / q); after a rejection p becomes the residual norm(max(p - q, 0)) and q loses
      the token. If all are rejected a token of the residual is emitted. Accepts more than ``sample`` where the draft is
      random. The shape of the tree must not depend on the tokens drawn: nodes kept because their tokens are probable
      are no draws from the draft any more, and only ``greedy`` and ``sample`` stay lossless with them.

    Random numbers come from ``seeds`` and the position of the token that is decided, never from the batch. Nothing
    reads the device, shapes are fixed: a CUDA graph can hold the call. A row of logits that cannot be used is reported
    in ``status``; the walk stops there and emits the largest of what is left (lowest id; 0 if nothing is).

    Args:
        logits: fp32, bf16 or fp16 ``[*tree.lead, V]``, V contiguous; row i holds what the target says after node i.
        tokens: int32 or int64 ``tree.lead``; the token of each node. Ids outside the vocabulary are never accepted.
        tree: topology, dense or packed.
        method: ``greedy``, ``sample`` or ``rejection``.
        params: temperature and filters; default temperature 1 and no filter. Not for ``greedy``.
        draft_probs: fp32, bf16 or fp16 ``[*tree.lead, V]``; row i is the distribution that the children of node i were
            drawn from (after the draft's own temperature and filters). For ``rejection`` only.
        seeds: int64 [B]. Required unless ``greedy`` or ``uniforms`` is given.
        positions: int32 or int64 [B], position of node 0 in its request (number of tokens before it). As ``seeds``.
        uniforms: fp32 ``[*tree.lead, 2]`` in [0, 1), replaces the generator: entry 0 of node i decides whether it is
            accepted (``rejection``), entry 1 draws the token emitted at node i.
        out: buffers of :meth:`Acceptance.empty`; allocated by default.

    Returns:
        The accepted paths, ``out`` if given.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, stride, device or combination of arguments.

    Example:
        >>> import torch
        >>> from bole_runtime import TreeBatch, accept
        >>> tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1]]))
        >>> logits = torch.zeros(1, 4, 10)
        >>> logits[0, 0, 7] = logits[0, 2, 5] = 1.0  # after node 0 comes 7, after node 2 comes 5
        >>> got = accept(logits, torch.tensor([[3, 9, 7, 1]]), tree)
        >>> got.accepted.tolist(), got.path.tolist(), got.bonus.tolist()
        ([2], [[0, 2, -1, -1]], [5])
    """
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is not allowed; allowed: {', '.join(METHODS)}")
    _check_tree(tree)
    vocabulary = _check_rows("logits", logits, tree)
    tokens = _check_tokens(tokens, tree)
    _check_combination(method, params, draft_probs, seeds, positions, uniforms)
    if method != "greedy":
        if params is None:
            params = SamplingParams(tree.max_batch, device=tree.device)
        if params.batch != tree.max_batch:
            raise ValueError(f"params: for {params.batch} requests, but the tree has {tree.max_batch}")
        if params.temperature.device != tree.device:
            raise ValueError(f"params: on {params.temperature.device}, but the tree is on {tree.device}")
    if draft_probs is not None and _check_rows("draft_probs", draft_probs, tree) != vocabulary:
        raise ValueError(f"draft_probs: vocabulary {draft_probs.shape[-1]}, but logits have {vocabulary}")
    if uniforms is not None:
        _check_uniforms(uniforms, tree)
    if seeds is not None:
        seeds = _check_request("seeds", seeds, tree)
        if seeds.dtype is not torch.int64:
            raise TypeError(f"seeds: dtype {seeds.dtype} is not allowed; allowed: torch.int64")
    if positions is not None:
        positions = _check_request("positions", positions, tree)
    call = AcceptCall(
        method, logits, tokens, tree, params, draft_probs, seeds, positions, uniforms, _check_out(out, tree)
    )
    return _run(call)


def accept_predicted(
    predicted: torch.Tensor, tokens: torch.Tensor, tree: TreeBatch, *, out: Acceptance | None = None
) -> Acceptance:
    """Walk the trees with a token already chosen at every node (an engine's argmax, or its own sampler).

    Args:
        predicted: int32 or int64 ``tree.lead``; the target's token after each node. A negative one is reported in
            ``status`` where it is visited and emits 0.
        tokens: int32 or int64 ``tree.lead``; the token of each node.
        tree: topology, dense or packed.
        out: as in :func:`accept`.

    Returns:
        As :func:`accept`.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes or devices.
    """
    _check_tree(tree)
    predicted = _check_lead("predicted", predicted, tree)
    tokens = _check_tokens(tokens, tree)
    return _run(AcceptCall("predicted", predicted, tokens, tree, None, None, None, None, None, _check_out(out, tree)))


def _run(call: AcceptCall) -> Acceptance:
    if call.tree.max_batch == 0:
        return call.out
    if backend_name(call.tree.device) == "triton":
        from bole_runtime.sampling.accept_triton import accept_into

        accept_into(call)
    else:
        from bole_runtime.sampling.walk import walk

        walk(call)
    return call.out


def _check_tree(tree: object) -> None:
    if not isinstance(tree, TreeBatch):
        raise TypeError(f"tree: expected a TreeBatch, got {type(tree).__name__}")


def _check_out(out: Acceptance | None, tree: TreeBatch) -> Acceptance:
    if out is None:
        return Acceptance.empty(tree)
    if not isinstance(out, Acceptance):
        raise TypeError(f"out: expected an Acceptance, got {type(out).__name__}")
    out.check_fits(tree)
    return out


def _check_rows(name: str, given: object, tree: TreeBatch) -> int:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")
    if given.dtype not in _FLOATS:
        raise TypeError(f"{name}: dtype {given.dtype} is not allowed; allowed: {', '.join(str(d) for d in _FLOATS)}")
    check_dense(name, given)
    if tuple(given.shape[:-1]) != tree.lead or given.dim() == 0 or given.shape[-1] == 0:
        shape = ", ".join(str(n) for n in tree.lead)
        raise ValueError(f"{name}: expected shape ({shape}, V) with V >= 1, got {tuple(given.shape)}")
    if given.device != tree.device:
        raise ValueError(f"{name}: on {given.device}, but the tree is on {tree.device}")
    if given.stride(-1) != 1 and given.shape[-1] > 1:
        raise ValueError(f"{name}: the vocabulary must be contiguous, got strides {given.stride()}")
    return given.shape[-1]


def _check_lead(name: str, given: object, tree: TreeBatch) -> torch.Tensor:
    tensor = check_index_tensor(name, given, len(tree.lead))
    if tuple(tensor.shape) != tree.lead:
        raise ValueError(f"{name}: expected shape {tree.lead}, got {tuple(tensor.shape)}")
    if tensor.device != tree.device:
        raise ValueError(f"{name}: on {tensor.device}, but the tree is on {tree.device}")
    return tensor.contiguous()


def _check_tokens(tokens: object, tree: TreeBatch) -> torch.Tensor:
    return _check_lead("tokens", tokens, tree)


def _check_request(name: str, given: object, tree: TreeBatch) -> torch.Tensor:
    tensor = check_index_tensor(name, given, 1)
    if tuple(tensor.shape) != (tree.max_batch,):
        raise ValueError(f"{name}: expected shape ({tree.max_batch},), got {tuple(tensor.shape)}")
    if tensor.device != tree.device:
        raise ValueError(f"{name}: on {tensor.device}, but the tree is on {tree.device}")
    return tensor.contiguous()


def _check_uniforms(uniforms: torch.Tensor, tree: TreeBatch) -> None:
    if not isinstance(uniforms, torch.Tensor) or uniforms.dtype is not torch.float32:
        given = uniforms.dtype if isinstance(uniforms, torch.Tensor) else type(uniforms).__name__
        raise TypeError(f"uniforms: expected a torch.float32 tensor, got {given}")
    check_dense("uniforms", uniforms)
    if tuple(uniforms.shape) != (*tree.lead, 2):
        raise ValueError(f"uniforms: expected shape {(*tree.lead, 2)}, got {tuple(uniforms.shape)}")
    if uniforms.device != tree.device:
        raise ValueError(f"uniforms: on {uniforms.device}, but the tree is on {tree.device}")
    if not uniforms.is_contiguous():
        raise ValueError("uniforms: must be contiguous")


def _check_combination(
    method: str,
    params: SamplingParams | None,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
) -> None:
    if params is not None and not isinstance(params, SamplingParams):
        raise TypeError(f"params: expected SamplingParams, got {type(params).__name__}")
    given = {"params": params, "seeds": seeds, "positions": positions, "uniforms": uniforms}
    if method == "greedy":
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(f"{extra[0]}: not used by method 'greedy'; leave it out or choose 'sample'")
    elif uniforms is not None:
        if seeds is not None or positions is not None:
            raise ValueError("uniforms: give either uniforms or seeds and positions")
    elif seeds is None or positions is None:
        missing = "seeds" if seeds is None else "positions"
        raise ValueError(f"{missing}: required by method {method!r} (or uniforms)")
    if method == "rejection" and draft_probs is None:
        raise ValueError("draft_probs: required by method 'rejection'")
    if method != "rejection" and draft_probs is not None:
        raise ValueError(f"draft_probs: not used by method {method!r}")
