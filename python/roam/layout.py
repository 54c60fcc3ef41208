"""Buffers without a graph: pieces of memory, each needed over a time, packed into one pool.

>>> from roam import layout
>>> buffers = layout.Buffers(lower=[0, 3, 0], upper=[3, 9, 9], size_bytes=[4, 4, 8])
>>> packing = layout.pack(buffers)
>>> packing.pool_bytes, packing.status
(12, 'optimal')

Files are those of MiniMalloc (docs/reference/formats.md).
"""

from roam._core import Buffers, Packing, pack
from roam._core import verify_packing as verify

__all__ = ["Buffers", "Packing", "pack", "verify"]
