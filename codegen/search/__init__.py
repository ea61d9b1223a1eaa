"""The search: which configuration is fastest for each bucket, checked before it counts."""

from __future__ import annotations
