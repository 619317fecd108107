"""The architectural state Θ: an immutable value with one canonical JSON form and a hash.

Knows no model, no schedule and no process group. Paper, eq. 8 (Θ_t) and section "Method".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Scope = Literal["attention", "block"]


@dataclass(frozen=True, slots=True)
class Loop:
    """How one layer loops once its entry is over, and where in its entry it stands.

    `heads`: ascending indices of the heads that stay; None for a whole block.
    `step`: update count at which the layer was activated.
    `entered`: update count of the newest decision about this loop; its entry window starts there.
    `leaving`: heads whose output falls from 1 to 0 during that window (entry `decay`; with `ramp`
    only those that have looped).
    """

    depth: int
    heads: tuple[int, ...] | None
    scope: Scope
    step: int
    entered: int
    leaving: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "depth": self.depth,
            "heads": None if self.heads is None else list(self.heads),
            "scope": self.scope,
            "step": self.step,
            "entered": self.entered,
            "leaving": list(self.leaving),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Loop:
        """The loop that `as_json` described. Raises: KeyError, TypeError, ValueError."""
        heads = values["heads"]
        scope = values["scope"]
        if scope not in ("attention", "block"):
            raise ValueError(f"scope {scope!r} is neither attention nor block")
        return cls(
            depth=int(values["depth"]),
            heads=None if heads is None else tuple(int(head) for head in heads),
            scope=scope,
            step=int(values["step"]),
            entered=int(values["entered"]),
            leaving=tuple(int(head) for head in values.get("leaving", ())),
        )


@dataclass(frozen=True, slots=True)
class State:
    """Θ: which layers loop, how, and which one is growing. Hashable by content."""

    loops: Mapping[int, Loop] = field(default_factory=lambda: MappingProxyType({}))
    growing_layer: int | None = None

    def __post_init__(self) -> None:
        ordered = MappingProxyType({layer: self.loops[layer] for layer in sorted(self.loops)})
        object.__setattr__(self, "loops", ordered)

    def __hash__(self) -> int:
        return hash(self.canonical())

    def with_loop(self, layer: int, loop: Loop, growing_layer: int | None) -> State:
        """A copy in which `layer` loops as given."""
        return State({**self.loops, layer: loop}, growing_layer)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; keys of `loops` are layer numbers as text."""
        return {
            "growing_layer": self.growing_layer,
            "loops": {str(layer): loop.as_json() for layer, loop in self.loops.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> State:
        """The state that `as_json` described. Raises: KeyError, TypeError, ValueError."""
        growing = values["growing_layer"]
        return cls(
            {int(layer): Loop.from_json(loop) for layer, loop in values["loops"].items()},
            None if growing is None else int(growing),
        )

    def canonical(self) -> str:
        """The one JSON text of this state: sorted keys, no spaces."""
        return json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 of the canonical text, in hex."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()


VANILLA = State()
