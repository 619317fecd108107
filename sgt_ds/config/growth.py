"""How a run grows: the section `growth`, and what method and shape forbid in it. Knows no policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from sgt_ds.config.model import Decay, ModelConfig, Section

# Methods whose layers are named, not grown.
LISTED_LAYERS = ("block_loop", "attention_loop", "high_entropy_loop", "low_entropy_loop")
_WINDOWS = frozenset({"t_start", "interval", "direction", "entropy_ema", "entry", "freeze_at"})
_STATIC = _WINDOWS | {"k_max", "heads", "stages"}
# Keys of `growth` that a method does not look at.
_UNUSED = {
    "vanilla": _STATIC | {"layers", "loops", "exclude_layers"},
    "block_loop": _STATIC,
    "attention_loop": _STATIC,
    "high_entropy_loop": frozenset({"k_max", "heads", "direction"}),
    "low_entropy_loop": frozenset({"k_max", "heads", "direction"}),
    "sgt": frozenset({"loops", "stages"}),
}
Entry = Literal["decay", "none", "ramp"]
Direction = Literal["d2s", "s2d"]


class FromJournal(Section):
    """Layers picked from another run's journal, as the paper picks the static methods' layers."""

    from_journal: Path
    """Growth journal of the run whose entropies are ranked."""
    step: NonNegativeInt
    """Step of that journal whose (EMA) entropies are used."""
    top: PositiveInt
    """How many layers are chosen, by highest mean entropy."""
    chosen: list[NonNegativeInt] | None = None
    """The chosen layers. A run records them here in its run.yaml and no longer needs the other journal."""


class GrowthConfig(Section):
    """How the model's depth grows. A method uses the keys that it needs."""

    k_max: PositiveInt = 3
    """Upper bound of a looping layer's depth (K_max); method sgt."""
    layers: PositiveInt | list[NonNegativeInt] | FromJournal = 3
    """sgt: the final number of looping layers (L). Other methods: the layers, as a list or from a journal."""
    heads: PositiveInt = 2
    """Heads that a looping layer re-applies (h); method sgt."""
    loops: PositiveInt = 1
    """Times a layer is re-applied; every method but sgt and vanilla."""
    stages: list[PositiveInt] = Field(default=[10, 2], min_length=1)
    """Number of heads left after each window; methods high_entropy_loop and low_entropy_loop."""
    t_start: NonNegativeInt = 250
    """Applied updates before the first decision (t_start)."""
    interval: PositiveInt = 250
    """Applied updates between decisions (Δt)."""
    direction: Direction = "d2s"
    """Order of growth: deep to shallow, or shallow to deep."""
    exclude_layers: list[NonNegativeInt] = Field(default=[0])
    """Layers that never loop (0-based)."""
    entropy_ema: Decay = 0.5
    """Weight of past values in the moving average of the entropies; 0 uses a single step."""
    entropy_every: PositiveInt = 1
    """Applied updates between measurements."""
    entry: Entry = "decay"
    """How a loop enters: decay: all heads, the leaving ones with a falling factor; none: at once;
    ramp: with a rising factor."""
    freeze_at: NonNegativeInt | None = None
    """Update count from which no more decisions are made."""


def unused_key(method: str, given: Iterable[str]) -> tuple[str, str] | None:
    """The first key of `given` that does nothing under `method`, and what to say of it.

    Nothing is said of a method that is not known here.
    """
    for key in given:
        if key in _UNUSED.get(method, ()):
            users = ", ".join(name for name, unused in _UNUSED.items() if key not in unused)
            return key, f"does nothing under method {method}; leave it out, or use it with {users}"
    return None


def growth_faults(method: str, growth: GrowthConfig, model: ModelConfig) -> list[tuple[str, str]]:
    """What in `growth` the method or the model's shape forbids: pairs (key, fault and remedy).

    Nothing is said of a method that is not known here: its policy checks what it needs.
    """
    faults: list[tuple[str, str]] = []
    last = model.num_layers - 1
    if method not in ("sgt", *LISTED_LAYERS):
        return faults
    for layer in growth.exclude_layers:
        if layer > last:
            faults.append(("exclude_layers", f"layer {layer} does not exist; the last is {last}"))
    own = _sgt_faults(growth, model) if method == "sgt" else _listed_faults(method, growth, model)
    return faults + own


def _eligible(growth: GrowthConfig, model: ModelConfig) -> int:
    return model.num_layers - len(set(growth.exclude_layers))


def _sgt_faults(growth: GrowthConfig, model: ModelConfig) -> list[tuple[str, str]]:
    """As `growth_faults`, for method sgt."""
    faults: list[tuple[str, str]] = []
    eligible = _eligible(growth, model)
    if not isinstance(growth.layers, int):
        faults.append(("layers", "method sgt takes the number of layers; give an integer"))
    elif growth.layers > eligible:
        faults.append(
            (
                "layers",
                f"{growth.layers} exceeds the {eligible} eligible layers; set {eligible} or fewer",
            )
        )
    if growth.heads > model.num_heads:
        faults.append(
            (
                "heads",
                f"{growth.heads} exceeds the model's {model.num_heads}; set {model.num_heads} or fewer",
            )
        )
    return faults


def _listed_faults(method: str, growth: GrowthConfig, model: ModelConfig) -> list[tuple[str, str]]:
    """As `growth_faults`, for the methods whose layers are named."""
    faults: list[tuple[str, str]] = []
    eligible, last = _eligible(growth, model), model.num_layers - 1
    if isinstance(growth.layers, int):
        faults.append(
            (
                "layers",
                f"method {method} takes a list of layers, e.g. [1], or {{from_journal, step, top}}",
            )
        )
    elif isinstance(growth.layers, list):
        faults += [("layers", fault) for fault in _list_faults(growth.layers, last)]
    else:
        chosen, top = growth.layers.chosen, growth.layers.top
        if top > eligible:
            message = f"{top} exceeds the {eligible} eligible layers; set {eligible} or fewer"
            faults.append(("layers.top", message))
        if chosen is not None:
            faults += [("layers.chosen", fault) for fault in _list_faults(chosen, last)]
            if len(chosen) != top:
                faults.append(
                    ("layers.chosen", f"names {len(chosen)} layers, not {top}; remove it")
                )
    if method in ("high_entropy_loop", "low_entropy_loop"):
        if list(growth.stages) != sorted(growth.stages, reverse=True):
            faults.append(("stages", "the number of heads must decrease from stage to stage"))
        if growth.stages[-1] > model.num_heads:
            faults.append(
                (
                    "stages",
                    f"{growth.stages[-1]} exceeds the model's {model.num_heads} heads; end with "
                    "fewer",
                )
            )
    return faults


def _list_faults(layers: list[int], last: int) -> list[str]:
    """What a list of layers may not be, `last` being the model's deepest."""
    faults = [
        f"layer {layer} does not exist; the last is {last}" for layer in layers if layer > last
    ]
    if not layers:
        faults.append("the list is empty; name at least one layer")
    if len(set(layers)) != len(layers):
        faults.append("a layer is listed twice; name each once")
    return faults
