"""Names of timm's models."""

from __future__ import annotations

import difflib


def check_timm_name(name: str, refusal: str) -> None:
    """Refuse a name that timm does not know, in the caller's words and with names that are close to it."""
    import timm

    if timm.is_model(name):
        return
    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists the names"
    raise ValueError(f"{refusal}: {hint}")
