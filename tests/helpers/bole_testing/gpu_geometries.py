"""Head dims of real models and of the corners, as dispatch serves them: one entry a family and geometry."""

from __future__ import annotations

from bole_testing.gpu_plan import FamilyEntry, make_entry
from bole_testing.pins import pin

GEOMETRIES: tuple[FamilyEntry, ...] = (
    # OLMo-Hybrid, Jet-Nemotron 2B and 4B.
    FamilyEntry("gdn", make_entry(pin(), nodes=20, dims=(96, 192), heads=(3, 3), capture=True)),
    FamilyEntry("gdn", make_entry(pin(), "fast", nodes=16, dims=(96, 256), heads=(3, 3), packed=True)),
    FamilyEntry("gdn", make_entry(pin(), nodes=60, dims=(128, 256))),
    FamilyEntry("gdn", make_entry(pin(), "fast", nodes=30, dims=(256, 256), heads=(1, 1))),
    FamilyEntry("gdn", make_entry(pin(), nodes=16, dims=(32, 32), heads=(1, 5))),
    FamilyEntry("deltanet", make_entry(pin(), nodes=30, dims=(256, 256), heads=(2, 2))),
    FamilyEntry("kda", make_entry(pin(), nodes=16, heads=(2, 2), capture=True)),
    FamilyEntry("kda", make_entry(pin(), "fast", nodes=16, heads=(3, 3), packed=True)),
    FamilyEntry("kda", make_entry(pin(), nodes=20, dims=(64, 64), heads=(3, 3))),
    FamilyEntry("kda", make_entry(pin(), "fast", nodes=16, dims=(256, 128), heads=(1, 1), capture=True)),
    FamilyEntry("kda", make_entry(pin(), nodes=16, dims=(96, 192), heads=(3, 3))),
    FamilyEntry("kda", make_entry(pin(), nodes=9, dims=(32, 32), heads=(1, 1))),
    FamilyEntry("gla", make_entry(pin(), nodes=30, dims=(64, 128), heads=(3, 3), mode="ready")),
    FamilyEntry("gdn2", make_entry(pin(), nodes=20, dims=(64, 64), heads=(3, 3))),
    FamilyEntry("comba", make_entry(pin(), "fast", nodes=16, dims=(64, 64), heads=(3, 3))),
    FamilyEntry("rwkv7", make_entry(pin(), nodes=30, dims=(64, 64), heads=(5, 5))),
    # Falcon-H1, PLaMo-2, Granite 4 350M, Falcon-H1-34B.
    FamilyEntry("mamba2", make_entry(pin(), "fast", nodes=16, dims=(256, 64), heads=(1, 3), capture=True)),
    FamilyEntry("mamba2", make_entry(pin(), nodes=30, dims=(64, 128), heads=(1, 5))),
    FamilyEntry("mamba2", make_entry(pin(), "fast", nodes=60, dims=(128, 32), heads=(1, 3))),
    FamilyEntry("mamba2", make_entry(pin(), nodes=16, dims=(256, 128), heads=(2, 4), packed=True)),
    FamilyEntry("lightning", make_entry(pin(), nodes=30, dims=(96, 96), heads=(3, 3), mode="ready", capture=True)),
    FamilyEntry("retention", make_entry(pin(), "fast", nodes=16, dims=(256, 256), heads=(1, 1), mode="ready")),
)
