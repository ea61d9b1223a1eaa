"""Correcting a drafter's probabilities by what was really accepted, on the device."""

from __future__ import annotations

import torch

from bole_runtime.sampling.result import Acceptance
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import check_capacity, check_dense

_BINS_PER_OCTAVE = 2
_FLOAT_MAX = torch.finfo(torch.float32).max


def _check_scores(scores: object) -> None:
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point():
        given = scores.dtype if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TypeError(f"scores: expected a floating-point tensor, got {given}")
    check_dense("scores", scores)


class AcceptanceModel:
    """Learns, for nodes of similar cumulative draft probability, how many are accepted for each one predicted.

    Nodes are put into bins of half an octave of probability. A bin's factor is ``(accepted + w) / (predicted + w)``,
    with w the weight of the prior that the drafter is right; old rounds fade out. Corrected scores are
    ``min(1, p * factor)``; :func:`~bole_runtime.budget.reach` keeps a child below its parent.

    Every verified node is seen to be accepted or not, whatever the rule that chose it, so the estimate has no bias
    among the nodes that were tried. A request whose walk met a row that cannot be used (``Acceptance.status``) says
    nothing of its nodes and is left out. State is on the device and updated in place, without a host sync.

    Attributes:
        predicted: fp32 [bins], faded sum of the draft's cumulative probabilities of verified nodes.
        accepted: fp32 [bins], faded number of those that were accepted.
    """

    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def __init__(
        self, *, bins: int = 24, prior: float = 8.0, memory: float = 200.0, device: torch.device | str = "cpu"
    ) -> None:
        """Start from the drafter's own probabilities.

        Args:
            bins: number of bins; the last one holds all that is less probable.
            prior: weight w of the prior, in accepted nodes.
            memory: rounds after which an observation has faded to 1/e.
            device: where the state lives.

        Raises:
            TypeError: not a number; ``bins`` no int.
            ValueError: a number is out of range.
        """
        check_capacity("bins", bins, 1, 1 << 16)
        for name, value, most in (("prior", prior, _FLOAT_MAX), ("memory", memory, float("inf"))):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
            if not 0 < value <= most:
                allowed = "above 0" if most > _FLOAT_MAX else "above 0, finite"
                raise ValueError(f"{name}: {value} is not allowed; allowed: {allowed}")
        self._prior = float(prior)
        self._fade = 1.0 - 1.0 / max(1.0, float(memory))
        self.predicted = torch.zeros(bins, device=device)
        self.accepted = torch.zeros(bins, device=device)

    def _bin(self, scores: torch.Tensor) -> torch.Tensor:
        octaves = -scores.clamp(1e-30, 1.0).log2() * _BINS_PER_OCTAVE
        return octaves.long().clamp(0, self.predicted.shape[0] - 1)

    def factors(self) -> torch.Tensor:
        """Return fp32 [bins], accepted nodes for each one that the drafter predicts."""
        return (self.accepted + self._prior) / (self.predicted + self._prior)

    def correct(self, scores: torch.Tensor) -> torch.Tensor:
        """Return corrected acceptance probabilities.

        Args:
            scores: fp32, any shape, the draft's cumulative probabilities.

        Returns:
            fp32, of that shape, within [0, 1].

        Raises:
            TypeError: not a floating-point tensor.
        """
        _check_scores(scores)
        clean = scores.float().nan_to_num(0.0).clamp(0.0, 1.0)
        return (clean * self.factors()[self._bin(clean)]).clamp(max=1.0)

    @torch.no_grad()  # what lives on keeps no round's graph
    def update(self, scores: torch.Tensor, tree: TreeBatch, result: Acceptance) -> None:
        """Take in a round.

        Args:
            scores: fp32 ``tree.lead``, the draft's cumulative probability of each verified node, uncorrected.
                No gradient is recorded.
            tree: what was verified.
            result: what was accepted.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: wrong shape or device, or the result is of another number of requests.
        """
        if not isinstance(tree, TreeBatch) or not isinstance(result, Acceptance):
            raise TypeError(
                f"tree, result: expected TreeBatch and Acceptance, got {type(tree).__name__} and "
                f"{type(result).__name__}"
            )
        _check_scores(scores)
        result.check_fits(tree, "result")
        if tuple(scores.shape) != tree.lead:
            raise ValueError(f"scores: expected shape {tree.lead}, got {tuple(scores.shape)}")
        if scores.device != self.predicted.device or tree.device != self.predicted.device:
            raise ValueError(f"scores, tree: must be on {self.predicted.device}")
        flat = scores.reshape(-1).float().nan_to_num(0.0).clamp(0.0, 1.0)
        # Roots are certain and teach nothing. A walk that was cut short rejected nothing: its request is left out.
        rows, live = tree.rows()
        usable = live & (result.status == 0).unsqueeze(1)
        seen = torch.zeros(tree.max_total + 1, device=flat.device)
        seen.scatter_(0, torch.where(usable, rows, tree.max_total).flatten(), 1.0)
        drafted = (tree.depths.reshape(-1) > 0) * seen[:-1]
        hit = torch.zeros(tree.max_total + 1, device=flat.device)
        hit.scatter_(0, torch.where(result.source >= 0, result.source, tree.max_total).flatten(), 1.0)
        bins = self._bin(flat)
        self.predicted.mul_(self._fade).scatter_add_(0, bins, flat * drafted)
        self.accepted.mul_(self._fade).scatter_add_(0, bins, hit[:-1] * drafted)
