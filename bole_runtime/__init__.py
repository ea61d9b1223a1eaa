"""Bole's runtime: verify proposal trees through recurrent layers and commit the accepted state."""

from __future__ import annotations

__version__ = "0.1.0"
