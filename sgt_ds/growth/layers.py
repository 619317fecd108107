"""The layers that a static method loops: a list, or the highest-entropy ones of another journal."""

from __future__ import annotations

from sgt_ds.config import FromJournal, GrowthConfig, ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.growth.lines import check_shape, journal_in, read_journal
from sgt_ds.growth.ranking import rank_layers
from sgt_ds.growth.statistics import EntropyAverage, Measurement


def given_layers(growth: GrowthConfig, model: ModelConfig) -> tuple[int, ...]:
    """The layers of a method whose layers do not depend on this run, ascending.

    Raises: UserError where they are a number, or the journal named can't give them.
    """
    if isinstance(growth.layers, FromJournal):
        if growth.layers.chosen is not None:
            return tuple(sorted(growth.layers.chosen))
        return layers_of_journal(growth.layers, growth, model)
    if isinstance(growth.layers, int):
        raise UserError("configuration", "growth.layers", "give the list of layers that loop")
    return tuple(sorted(growth.layers))


def resolve_growth(growth: GrowthConfig, model: ModelConfig) -> GrowthConfig:
    """The same configuration with layers that come from a journal as a plain list.

    Raises: UserError where they are not chosen yet, and that journal can't be used.
    """
    if not isinstance(growth.layers, FromJournal):
        return growth
    return growth.model_copy(update={"layers": list(given_layers(growth, model))})


def layers_of_journal(
    source: FromJournal, growth: GrowthConfig, model: ModelConfig
) -> tuple[int, ...]:
    """The layers of highest entropy at a step of another journal, ascending.

    Raises: UserError where it is of another shape, or that step was not measured.
    """
    path = journal_in(source.from_journal)
    header, lines = read_journal(path, live=True)
    average = EntropyAverage(growth.entropy_ema if header is None else header.growth.entropy_ema)
    nearest: int | None = None
    for line in lines:
        if not isinstance(line, Measurement):
            continue
        if line.step > source.step:
            break
        nearest = line.step
        check_shape(path, line, model)
        entropy = average.update(line)
        if line.step < source.step:
            continue
        if (place := entropy.first_not_finite()) is not None:
            message = f"layer {place[0]}, head {place[1]} is not finite at step {line.step}"
            raise UserError(path, None, f"{message}; choose another growth.layers.step")
        ranked = rank_layers(entropy.layer_means(), growth.exclude_layers)
        return tuple(sorted(ranked[: source.top]))
    last = "no earlier step was" if nearest is None else f"the last one before it is {nearest}"
    message = f"step {source.step} was not measured, {last}; set growth.layers.step to one that was"
    raise UserError(path, None, message)
