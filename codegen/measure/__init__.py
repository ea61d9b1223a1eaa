"""Measurement: the benchmark protocol, the byte model, and realistic inputs.

Imports on a machine without a GPU; only the functions that time something need one.
"""

from __future__ import annotations

from bole_codegen.measure.bandwidth import copy_bandwidth
from bole_codegen.measure.check import poison_, relative_error
from bole_codegen.measure.clocks import Clocks, read_clocks
from bole_codegen.measure.cold import is_cold, layers_for_cold_l2
from bole_codegen.measure.inputs import (
    LayerInputs,
    VerifyInputs,
    input_bytes_per_layer,
    make_layer_inputs,
    make_verify_inputs,
    ready_gates,
)
from bole_codegen.measure.timing import (
    CaptureError,
    LayerGraph,
    Timing,
    capture_layers,
    host_overhead_us,
    time_interleaved,
    time_launches,
)
from bole_codegen.measure.traffic import Traffic, Workload, commit_traffic, floor_us, verify_traffic
from bole_codegen.measure.trees import SHAPES, make_parents, tree_depth, tree_depths

__all__ = [
    "SHAPES",
    "CaptureError",
    "Clocks",
    "LayerGraph",
    "LayerInputs",
    "Timing",
    "Traffic",
    "VerifyInputs",
    "Workload",
    "capture_layers",
    "commit_traffic",
    "copy_bandwidth",
    "floor_us",
    "host_overhead_us",
    "input_bytes_per_layer",
    "is_cold",
    "layers_for_cold_l2",
    "make_layer_inputs",
    "make_parents",
    "make_verify_inputs",
    "poison_",
    "read_clocks",
    "ready_gates",
    "relative_error",
    "time_interleaved",
    "time_launches",
    "tree_depth",
    "tree_depths",
    "verify_traffic",
]
