"""The growth policy protocol and the registry. A new method is a file and one line here.

A policy is pure: equal arguments, equal decisions. It knows no model and no process group.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from sgt_ds.config import Entry, GrowthConfig, ModelConfig, nearest
from sgt_ds.errors import UserError
from sgt_ds.growth.decision import Decision, Phase
from sgt_ds.growth.state import State
from sgt_ds.growth.statistics import Entropy


@runtime_checkable
class Policy(Protocol):
    """Which loops a model has, step by step."""

    entry: Entry
    """How this policy's loops enter; `none` where Θ never changes."""

    def initial_state(self) -> State:
        """Θ at step 0."""
        ...

    def is_due(self, step: int, state: State) -> bool:
        """Whether something is decided after the update that makes the count `step`."""
        ...

    def decide(self, step: int, entropy: Entropy | None, state: State) -> Decision:
        """Decide; only called where due. `entropy` None: this step was not measured."""
        ...

    def phase(self, step: int, state: State) -> Phase:
        """The phase at `step` with Θ as after any decision there."""
        ...


# Where each method's policy is made: module of this package and callable (growth, model) -> Policy.
POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "vanilla": "vanilla.vanilla",
        "block_loop": "static.block_loop",
        "attention_loop": "static.attention_loop",
        "high_entropy_loop": "entropy_loops.high_entropy_loop",
        "low_entropy_loop": "entropy_loops.low_entropy_loop",
        "sgt": "sgt.SparseGrowing",
    }
)


def check_method(method: str, source: str, field: str = "method") -> None:
    """Raises: UserError naming `source` and `field` where no policy has that name."""
    if method not in POLICIES:
        hint = nearest(method, POLICIES)
        raise UserError(source, field, f"'{method}' is unknown{hint}; known: {', '.join(POLICIES)}")


def build_policy(method: str, growth: GrowthConfig, model: ModelConfig) -> Policy:
    """The policy that a configuration asks for.

    Raises: UserError for an unknown method, or a journal to pick layers from that can't be used.
    """
    check_method(method, "configuration")
    module, _, factory = POLICIES[method].partition(".")
    make = getattr(importlib.import_module(f"sgt_ds.growth.{module}"), factory)
    policy: Policy = make(growth, model)
    return policy
