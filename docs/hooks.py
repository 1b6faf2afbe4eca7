"""Equations for the site: GitHub renders ```math blocks by itself, mkdocs does not."""

import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with its ```math blocks as MathML, which browsers show without a script."""

    def equation(found: re.Match[str]) -> str:
        return f"<div>{convert(' '.join(found[1].split()), display='block')}</div>\n"

    return re.sub(r"^```math\n(.*?)^```$", equation, markdown, flags=re.MULTILINE | re.DOTALL)
