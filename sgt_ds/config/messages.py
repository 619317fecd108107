"""What a value should be, in terms of the YAML file. Reads no file and raises nothing."""

from __future__ import annotations

from typing import Any

from pydantic_core import ErrorDetails

from sgt_ds.config.suggestions import nearest


def in_plain_words(detail: ErrorDetails, example: Any = None) -> str:
    """The fault that pydantic found: what to write instead. `example`: a good value, if known."""
    kind, limits = detail["type"], detail.get("ctx", {})
    if kind in ("int_parsing", "int_type", "int_from_float", "int_parsing_size"):
        return f"must be a whole number, e.g. {example if type(example) is int else 1000}"
    if kind in ("float_parsing", "float_type"):
        return f"must be a number, e.g. {example if type(example) is float else 0.5}"
    if kind in ("bool_parsing", "bool_type"):
        return "must be true or false"
    if kind == "string_type":
        return "must be a string; quote it if it looks like a number"
    if kind == "path_type":
        return "must be a path; quote it if it looks like a number"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "literal_error":
        return f"must be {limits['expected']}"
    if kind in ("too_short", "too_long"):
        most = kind == "too_long"
        count = limits["max_length" if most else "min_length"]
        return f"must hold {count} or {'fewer' if most else 'more'}"
    for limit, form in (
        ("gt", "must be above {}"),
        ("ge", "must be {} or more"),
        ("lt", "must be below {}"),
        ("le", "must be {} or less"),
    ):
        if limit in limits:
            return form.format(limits[limit])
    return detail["msg"].removeprefix("Value error, ")


def suggestion_for(detail: ErrorDetails) -> str:
    """The nearest of the values that are possible, where they are counted and one is near."""
    if detail["type"] != "literal_error":
        return "; correct it"
    known = [
        name.strip("'") for name in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")
    ]
    return nearest(str(detail.get("input")), known) or "; correct it"
