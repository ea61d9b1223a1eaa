"""Sampling parameters of a batch, one value a request, as device tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.tree.check import check_capacity

#: Temperatures up to this one are greedy: the distribution would be one-hot in fp32 anyway.
GREEDY_TEMPERATURE = 1e-5

_FIELDS: dict[str, tuple[torch.dtype, str]] = {
    "temperature": (torch.float32, "finite and >= 0"),
    "top_k": (torch.int32, "an integer below 2**31; 0 or less means off"),
    "top_p": (torch.float32, "in (0, 1]"),
    "min_p": (torch.float32, "in [0, 1]"),
}
Value = float | int | Sequence[float] | Sequence[int] | torch.Tensor


class SamplingParams:
    """Temperature, top-k, top-p and min-p of each request.

    They apply in this order: logits are divided by the temperature; top-k keeps the k largest; top-p keeps, of the
    mass that is left, the most probable tokens up to and including the one that reaches p; min-p keeps tokens with at
    least min_p times the probability of the most probable one. Tokens that tie with the last one kept are kept too,
    so the result does not depend on the order of the vocabulary.

    A filter that is None costs nothing. A filter that is given may be changed in place between replays of a captured
    CUDA graph, down to its neutral value (top_k 0, top_p 1, min_p 0).

    Attributes:
        temperature: fp32 [B]; up to 1e-5 is greedy (lowest id among ties).
        top_k: int32 [B] or None.
        top_p: fp32 [B] or None.
        min_p: fp32 [B] or None.
    """

    __slots__ = ("min_p", "temperature", "top_k", "top_p")

    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    def __init__(
        self,
        batch: int,
        *,
        temperature: Value = 1.0,
        top_k: Value | None = None,
        top_p: Value | None = None,
        min_p: Value | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take one value for all requests, or one a request.

        Args:
            batch: requests B.
            temperature: number, sequence of B numbers, or tensor [B] (taken as it is if dtype and device fit).
            top_k: likewise.
            top_p: likewise.
            min_p: likewise.
            device: where the tensors live.

        Raises:
            TypeError: a value is no number, sequence or tensor of numbers.
            ValueError: a shape is not [B], or a value is outside its range (tensors on a device are not read).
        """
        check_capacity("batch", batch, 0, 2**31 - 1)
        target = torch.device(device)
        if temperature is None:
            raise TypeError("temperature: None is not allowed; allowed: finite and >= 0 (0 is greedy)")
        values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for name, value in values.items():
            setattr(self, name, None if value is None else _field(name, value, batch, target))

    @property
    def batch(self) -> int:
        """Number of requests."""
        return self.temperature.shape[0]

    @property
    def filters(self) -> bool:
        """Whether any of top-k, top-p and min-p is in use."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


def _field(name: str, value: Value, batch: int, device: torch.device) -> torch.Tensor:
    dtype, allowed = _FIELDS[name]
    if isinstance(value, torch.Tensor):
        given = value
    else:
        try:
            given = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: {value!r} is not allowed; allowed: {allowed}") from error
    if given.dtype is torch.bool or given.is_complex() or (name == "top_k" and given.is_floating_point()):
        what = f"dtype {given.dtype}" if given is value else repr(value)
        raise TypeError(f"{name}: {what} is not allowed; allowed: {allowed}")
    if given.dim() == 0:
        given = given.expand(batch)
    if tuple(given.shape) != (batch,):
        raise ValueError(f"{name}: expected shape ({batch},), got {tuple(given.shape)}")
    if given.device.type == "cpu":
        _check_values(name, given, allowed)
    return given.to(device=device, dtype=dtype).contiguous()


def _check_values(name: str, given: torch.Tensor, allowed: str) -> None:
    # What counts is the value that is kept: of a float64 tensor, fp32.
    wide = given.double() if name == "top_k" else given.float().double()
    wrong = {
        "temperature": ~(wide.isfinite() & (wide >= 0)),
        "top_k": wide.abs() > 2**31 - 1,
        "top_p": ~((wide > 0) & (wide <= 1)),
        "min_p": ~((wide >= 0) & (wide <= 1)),
    }[name]
    if bool(wrong.any()):
        first = given[wrong][0].item()
        raise ValueError(f"{name}: {first} is not allowed; allowed: {allowed}")
