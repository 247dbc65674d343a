"""Attention modules behind one interface, and the definition of selective attention."""

from selmodel.attention.base import Attention
from selmodel.attention.selective import SelectiveAttention
from selmodel.attention.standard import StandardAttention

__all__ = ["Attention", "SelectiveAttention", "StandardAttention"]
