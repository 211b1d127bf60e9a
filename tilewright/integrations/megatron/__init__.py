"""Megatron-Core over our ops: `apply()` puts them in the place of its functions, `remove()` takes them away again.

Nothing of Megatron is imported before `apply` or one of its modules here is asked for.
"""

from .patches import apply, remove

__all__ = ["apply", "remove"]
