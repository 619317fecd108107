"""Elements of HTML and SVG as text. Whatever is not markup already is escaped: nothing that comes
from a file can become an element or an attribute. Knows no plot.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = {"meta", "br", "path", "rect", "line"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable["Child"] | None
"""What an element may hold: text to escape, markup, nothing, or several of these."""


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """An element. `class_` and `stroke_width` become `class` and `stroke-width`.

    An attribute that is None or False is left out; True gives one without a value.
    """
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Markup(f"<{head}{'/' if name in ('path', 'rect', 'line') else ''}>")
    return Markup(f"<{head}>{joined(children)}</{name}>")


def joined(children: Child) -> Markup:
    """Children one after another, text escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(children))
    return Markup("".join(joined(child) for child in children))


def short(value: float) -> str:
    """A coordinate with as few digits as a picture needs."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = value if isinstance(value, str) else short(value)
    return f' {name}="{escape(text, quote=True)}"'
