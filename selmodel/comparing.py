"""Where two settings differ, in words."""

from __future__ import annotations

from typing import Any


def differences(
    old: Any, new: Any, name: str = "", *, there: str = "in the checkpoint", here: str = "now"
) -> list[str]:
    """Where two plain values differ, one line each: ``n_heads: 4 in the checkpoint, 8 now``."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{name}.{key}" if name else str(key)
            found += differences(old.get(key, "absent"), new.get(key, "absent"), inner, there=there, here=here)
        return found
    same = list(old) == list(new) if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) else old == new
    return [] if same else [f"{name}: {old} {there}, {new} {here}"]
