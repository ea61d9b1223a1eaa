"""Tables of tuned configurations: schema, loading and lookup.

``bole_runtime.tables.lookup`` chooses a configuration for a problem. msgspec is imported only when a table is read.
"""

from __future__ import annotations
