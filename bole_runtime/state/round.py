"""One round: verify every layer, then commit what was accepted. Made once for a tree, used every round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bole_runtime import validate as check
from bole_runtime import validate_values as values
from bole_runtime.api import verify
from bole_runtime.calls import RowAction
from bole_runtime.conv import conv_commit, tree_conv
from bole_runtime.factors import Factors
from bole_runtime.state.chain_counters import ChainRule
from bole_runtime.state.chains import decide
from bole_runtime.state.commits import PreparedLayers, prepare_layers
from bole_runtime.state.context import CallContext
from bole_runtime.state.kernels import Kernels
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import checks_values

if TYPE_CHECKING:
    from bole_runtime.state.manager import StateManager


class Round:
    """The calls of one round over a fixed tree object and slots tensor, whose contents change between rounds.

    Launches of a round with L layers: L verifications; then one commit for all layers of a geometry under ``eager``;
    one decision and one such launch under ``deferred`` and ``fused``. Under ``fused`` each verification is preceded by
    the launch that writes the layer's waiting tokens, so that it finds the state in cache. Convolutions add their own
    launch a layer and one commit.

    Made by :meth:`StateManager.round`. Descriptor tables are built at the first commit: run one round before a CUDA
    graph is captured, and keep the object as long as the graph.

    Attributes:
        tree: topology, rebuilt in place by the caller before each round.
        slots: int32 or int64 [max_batch of the tree], changed in place by the caller; no live slot twice.
        actions: int32, what the last commit did with each row (:class:`~bole_runtime.calls.RowAction`); all 0 before,
            and under ``eager``, which commits every row.
    """

    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def __init__(self, manager: StateManager, tree: TreeBatch, slots: torch.Tensor) -> None:
        config = manager.config
        self.tree, self.slots = tree, slots
        self.actions = torch.zeros(tree.max_batch, dtype=torch.int32, device=tree.device)
        self._manager = manager
        self._flush = torch.full_like(self.actions, int(RowAction.FLUSH))
        self._nothing = torch.full_like(self.actions, -1)
        count = range(len(config.layers))
        self._buffers = [manager.buffers.factors(n, config.layers[n], config.dtype, tree) for n in count]
        self._inputs = [manager.buffers.conv_factors(n, config.layers[n], tree) for n in count]
        self._factors: list[Factors | None] = [None] * len(config.layers)
        self._convolved = [False] * len(config.layers)
        self._written: set[int] = set()
        self._specs = [layer.spec for layer in config.layers]
        self._modes = [layer.spec.kept_mode(layer.gate_mode) for layer in config.layers]
        self._kernels: dict[tuple[object, ...], Kernels] = {}
        self._writes: dict[int, PreparedLayers] = {}
        self._commit: PreparedLayers | None = None
        # A captured graph reads the tables of the commits that it holds.
        self._kept: list[PreparedLayers] = []
        self._rule = ChainRule(config.pending, config.flush_at, consumed=config.policy == "fused")

    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        gates: Mapping[str, torch.Tensor | float],
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Verify one recurrent layer; its factors go to the manager's buffers.

        Args:
            layer: number of the layer.
            q: queries, of the tree's rows; as for :func:`bole_runtime.verify`. Same for k and v.
            k: keys.
            v: values.
            gates: of the family.
            out: where to write.
            out_dtype: dtype of the output.
            **options: ``scale``, ``qk_l2norm``, ``variant``, ``validate`` of :func:`bole_runtime.verify`.

        Returns:
            The output of every node.

        Raises:
            ValueError: an argument is wrong, the layer was already verified in this round, ``qk_l2norm`` or a float of
                the gates is not that of earlier calls whose tokens may still wait in a chain, or (``fused``, where
                values are checked) a slot is that of two requests.
        """
        manager = self._manager
        config = manager.config
        spec = self._specs[manager.index(layer)]
        if self._factors[layer] is not None:
            raise ValueError(f"layer: {layer} was verified in this round already; commit or abandon the round first")
        if not isinstance(gates, Mapping):
            check.not_a("gates", gates, "a mapping from gate names to tensors")
        l2norm = options.get("qk_l2norm")
        context = self._context_of(layer, gates, l2norm)
        if config.policy == "fused" and checks_values(options.get("validate"), self.tree.device):
            # Before anything is written: this policy writes waiting tokens first.
            values.check_slots(self.slots, config.slots)
            if twice := values.duplicated(self.slots):
                raise ValueError(
                    f"slots: {twice} are those of several requests, whose waiting tokens would be written twice"
                )
        self._begin()
        pending = manager.request.chains[layer] if config.policy == "deferred" else None
        variant = options.pop("variant", None)
        # What a call of this form needs is worked out once: the names of its gates tell the form.
        form = (layer, l2norm, *gates)
        kernels = self._kernels.get(form)
        if kernels is None:
            kernels = manager.kernels.of_verify(config.layers[layer], gates, self.tree, l2norm)
            self._kernels[form] = kernels
        if config.policy == "fused":
            self._write_waiting(layer)
        out, factors = verify(
            q,
            k,
            v,
            gates=gates,
            state=manager.request.pools[layer],
            slots=self.slots,
            tree=self.tree,
            recurrence=spec,
            precision=config.precision,
            out=out,
            out_dtype=out_dtype,
            factors=self._buffers[layer],
            # A configuration of the caller's own may need more than the one that was looked up.
            workspace=manager.scratch.reserve(kernels.scratch) if variant is None else None,
            pending=pending,
            variant=kernels.variant if variant is None else variant,
            **options,
        )
        self._factors[layer] = factors
        manager.request.contexts[layer] = context
        return out

    def conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Run the short convolution of a layer; its raw inputs go to the manager's buffers.

        Args:
            layer: number of the layer.
            x: raw inputs, of the tree's rows; as for :func:`bole_runtime.tree_conv`.
            weight: [C, W].
            bias: [C] or None.
            **options: further arguments of :func:`bole_runtime.tree_conv`.

        Returns:
            The output of every node.

        Raises:
            ValueError: an argument is wrong, or the layer has no convolution.
        """
        pool = self._manager.request.conv_pools[self._manager.index(layer)]
        inputs = self._inputs[layer]
        if pool is None or inputs is None:
            raise ValueError(f"layer: {layer} was declared without a convolution (conv_width = 0)")
        self._begin()
        if options.get("variant") is None and isinstance(weight, torch.Tensor):
            silu = options.get("activation", "silu") is not None
            options["variant"] = self._manager.kernels.of_conv(
                self._manager.config.layers[layer], bias=bias is not None, silu=silu, dynamic=weight.dim() > 2
            )
        out, _ = tree_conv(
            x, weight, bias, state=pool, slots=self.slots, tree=self.tree, factors=inputs, **options
        )  # fmt: skip
        self._convolved[layer] = True
        return out

    def commit(self, accepted: torch.Tensor, *, validate: bool | None = None) -> None:
        """End the round: the accepted paths enter the states, or wait in the pending chains, as the policy says.

        Convolution states advance at once under every policy: what they hold is a few raw inputs.

        Args:
            accepted: int32 or int64 [B], request-local terminal node; -1: nothing accepted, the request stays as it is.
            validate: check index values (a host sync on a device). Default: only for CPU tensors.

        Raises:
            TypeError: a wrong type or dtype.
            ValueError: a wrong shape, device or value, or a layer was not verified in this round, or not convolved
                though it has a convolution. Nothing has been written.
        """
        manager, tree = self._manager, self.tree
        accepted = check.check_index("accepted", accepted, tree.device, tree.max_batch)
        missing = [n for n, f in enumerate(self._factors) if f is None]
        if missing:
            raise ValueError(f"layers {missing} were not verified in this round; a commit takes all layers")
        missing = [n for n, f in enumerate(self._inputs) if f is not None and not self._convolved[n]]
        if missing:
            # Their states would stay behind the recurrent ones, and every later round would read the wrong inputs.
            raise ValueError(
                f"layers {missing} were not convolved in this round; a commit takes all layers with a convolution (one "
                "whose convolution is computed elsewhere is declared with conv_width = 0)"
            )
        if checks_values(validate, tree.device):
            values.check_status(tree)
            values.check_slots(self.slots, manager.config.slots)
            values.check_accepted(accepted, self.slots, tree)
            free = set(self.slots.tolist()) - manager.used_slots - {-1}
            if free:
                raise ValueError(f"slots: {sorted(free)} are not in use; allocate() gives out slots")
        if tree.max_batch:
            self._advance(accepted)
        self._end()

    def _advance(self, accepted: torch.Tensor) -> None:
        manager = self._manager
        if self._commit is None or not self._commit.serves(self._factors):
            chains = [manager.request.counters.before(c) for c in manager.request.chains]
            self._commit = prepare_layers(manager, self, self._factors, chains)
        if any(self._convolved):  # every layer that has one
            pools = [p for p in manager.request.conv_pools if p is not None]
            conv_commit(pools, self.slots, [f for f in self._inputs if f is not None], accepted, validate=False)
        self._keep(self._commit)
        if manager.config.policy == "eager":
            self._commit(self.slots, accepted, None)
            return
        decide(manager.request.counters, self._rule, self.tree, self.slots, accepted, self.actions)
        self._commit(self.slots, accepted, self.actions)

    def abandon(self, *, launched: bool = True) -> None:
        """End the round with nothing accepted; also after an error in the middle of it. Without a round, do nothing.

        Args:
            launched: whether what was called of the round ran; False after a CUDA graph could not be captured.
        """
        if self._manager.current is not self:
            return
        if launched and self._manager.config.policy == "fused":
            for layer in range(len(self._factors)):
                self._write_waiting(layer)
            request = self._manager.request
            decide(request.counters, self._rule, self.tree, self.slots, self._nothing, self.actions)
        self._end()

    def _write_waiting(self, layer: int) -> None:
        """Fold the tokens that wait in a layer's chain into its state, right before the state is read; once a round."""
        manager = self._manager
        if layer in self._written:
            return
        made, context = self._writes.get(layer), manager.request.contexts[layer]
        if not context.serves(self._buffers[layer].spec, self._buffers[layer].gate_mode):
            return
        part = context.apply(self._buffers[layer])
        if made is None or not made.serves([part]):
            made = prepare_layers(manager, self, [part], [manager.request.chains[layer]], [layer])
            self._writes[layer] = made
        self._keep(made)
        made(self._once(), self._nothing, self._flush)
        self._written.add(layer)

    def _once(self) -> torch.Tensor:
        """Return the slots; where they can be read for nothing, one that two requests have is kept in the first."""
        slots = self.slots
        if slots.device.type != "cpu" or not values.duplicated(slots):
            return slots
        before = (slots.unsqueeze(0) == slots.unsqueeze(1)).tril(-1).any(1)
        return torch.where(before, -1, slots)

    def _context_of(self, layer: int, gates: Mapping[str, torch.Tensor | float], l2norm: bool | None) -> CallContext:
        """Return what a call says about the tokens that it keeps, checked against those that wait from earlier calls.

        Raises:
            ValueError: they would be folded in with other numbers than they were verified with.
        """
        request, spec = self._manager.request, self._specs[layer]
        context = CallContext.of_gates(spec, self._modes[layer], gates, l2norm)
        if request.chains:
            changed = context.difference(request.contexts[layer])
            if changed:
                raise ValueError(
                    f"layer {layer}: {changed}; tokens of earlier calls may wait in a chain, so these do not change "
                    "from round to round"
                )
        return context

    def _keep(self, made: PreparedLayers) -> None:
        if self.tree.device.type == "cuda" and made not in self._kept and torch.cuda.is_current_stream_capturing():
            self._kept.append(made)

    def _begin(self) -> None:
        manager = self._manager
        if manager.current is not None and manager.current is not self:
            raise ValueError("another round of this manager was begun; commit or abandon it first")
        manager.current = self

    def _end(self) -> None:
        self._manager.current = None
        self._factors = [None] * len(self._factors)
        self._convolved = [False] * len(self._convolved)
        self._written.clear()
