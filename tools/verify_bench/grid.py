"""Benchmark points, the targets they are judged by, and the reference points of the serial kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bole_codegen.measure import Workload

#: (B, N) -> least ratio over the serial tree kernel, for HK 16, HV 32, 128 x 128, by profile.
TARGET_RATIOS: dict[str, dict[tuple[int, int], float]] = {
    "fast": {(1, 16): 4.0, (8, 16): 7.0, (64, 16): 20.0, (64, 64): 45.0},
    "lossless": {(1, 16): 3.0, (8, 16): 5.0, (64, 16): 14.0, (64, 64): 25.0},
}
#: Points that are run when none are named: those with a target.
TARGET_POINTS: tuple[tuple[int, int], ...] = tuple(TARGET_RATIOS["fast"])

#: (B, N) -> microseconds of the serial kernel on an H200: HK 16, HV 32, 128 x 128, fp32 state, ragged trees.
SERIAL_REFERENCE_US: dict[tuple[int, int], float] = {
    (1, 16): 23.2,
    (8, 16): 96.5,
    (64, 16): 1515.0,
    (64, 32): 3257.0,
    (1, 64): 90.5,
    (8, 64): 537.0,
    (64, 64): 9994.0,
    (1, 129): 206.0,
    (8, 129): 1852.0,
}
#: A ratio over a serial time further than this from its reference point is marked.
REFERENCE_TOLERANCE = 0.10


@dataclass(frozen=True)
class Point:
    """One benchmark point: a geometry, a batch of trees, and the dtypes."""

    batch: int
    nodes: int
    shape: str
    hk: int
    hv: int
    dk: int
    dv: int
    in_dtype: str
    state_dtype: str
    out_dtype: str
    gates: str
    factors: str
    family: str = "gdn"
    pending: int = 0

    @property
    def workload(self) -> Workload:
        """The byte model's view of the point."""
        return Workload(
            self.batch,
            self.nodes,
            self.hk,
            self.hv,
            self.dk,
            self.dv,
            self.in_dtype,
            self.state_dtype,
            self.out_dtype,
            self.gates,
            pending=self.pending,
            family=self.family,
        )

    @property
    def title(self) -> str:
        """One line that identifies the point."""
        return (
            f"{self.family} B{self.batch} N{self.nodes} {self.shape} HK{self.hk}/HV{self.hv} {self.dk}x{self.dv} "
            f"state {self.state_dtype} {self.gates} gates" + (f" after {self.pending} pending" if self.pending else "")
        )

    def is_reference_geometry(self) -> bool:
        """Whether targets and reference points are stated for this geometry and state dtype."""
        here = (self.family, self.hk, self.hv, self.dk, self.dv, self.state_dtype, self.pending)
        return here == ("gdn", 16, 32, 128, 128, "fp32", 0)


def parse_ints(text: str) -> list[int]:
    """Parse ``1,8,64``.

    Raises:
        ValueError: an entry is not a positive whole number.
    """
    numbers = [int(part) for part in text.split(",") if part.strip()]
    if not numbers or min(numbers) < 1:
        raise ValueError(f"expected positive numbers such as 1,8,64, got {text!r}")
    return numbers


def parse_points(text: str) -> list[tuple[int, int]]:
    """Parse ``1x16,64x64`` (batch x nodes).

    Raises:
        ValueError: an entry has another form.
    """
    points = []
    for part in text.split(","):
        batch, cross, nodes = part.strip().lower().partition("x")
        if not cross or not batch.isdigit() or not nodes.isdigit() or not int(batch) or not int(nodes):
            raise ValueError(f"expected BATCHxNODES such as 8x16, got {part!r}")
        points.append((int(batch), int(nodes)))
    return points


def expand(
    sizes: Sequence[tuple[int, int]], shapes: Sequence[str], state_dtypes: Sequence[str], **fixed: object
) -> Iterator[Point]:
    """Yield every combination, sizes innermost so that neighbours in the table compare."""
    for state_dtype in state_dtypes:
        for shape in shapes:
            for batch, nodes in sizes:
                yield Point(batch=batch, nodes=nodes, shape=shape, state_dtype=state_dtype, **fixed)  # type: ignore[arg-type]


def reference_deviation(point: Point, serial_us: float | None) -> float | None:
    """Return how far the serial time is from its reference point, as a fraction; None where there is no such point."""
    known = SERIAL_REFERENCE_US.get((point.batch, point.nodes))
    if serial_us is None or known is None or not point.is_reference_geometry() or point.shape != "ragged":
        return None
    return serial_us / known - 1.0


def verdict(point: Point, profile: str, ratio: float | None, deviation: float | None) -> str:
    """Say whether a ratio meets its target: ``met >=20x``, ``MISSED >=20x``, with ``void`` where the peer is off."""
    target = TARGET_RATIOS.get(profile, {}).get((point.batch, point.nodes))
    if target is None or not point.is_reference_geometry() or point.shape != "ragged":
        return ""
    if ratio is None:
        return f"no ratio (>={target:g}x)"
    text = f"{'met' if ratio >= target else 'MISSED'} >={target:g}x"
    if deviation is not None and abs(deviation) > REFERENCE_TOLERANCE:
        text += f" (void: serial {deviation:+.0%} from its reference)"
    return text
