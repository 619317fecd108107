"""Requirements of float8 products on a run's shapes. Knows no torch."""

from __future__ import annotations

from sgt_ds.config.model import ModelConfig

# Of rows and columns of every operand, on a GPU.
MULTIPLE = 16


def float8_faults(model: ModelConfig, sequence_length: int) -> list[tuple[str, str]]:
    """Which sizes float8 does not allow: pairs (key, fault and remedy).

    A loop computes as few as one head, so that a head alone must be a multiple, not all together.
    """
    return [
        (key, f"{size} must be a multiple of {what} in float8; set {_near(size, unit)}")
        for key, size, what, unit in (
            (
                "model.hidden_size",
                model.hidden_size,
                f"{MULTIPLE} × num_heads ({MULTIPLE * model.num_heads})",
                MULTIPLE * model.num_heads,
            ),
            ("model.intermediate_size", model.intermediate_size, str(MULTIPLE), MULTIPLE),
            ("data.sequence_length", sequence_length, str(MULTIPLE), MULTIPLE),
        )
        if size % unit
    ]


def _near(size: int, unit: int) -> str:
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
