"""In-loop tasks and texts: batches split over the ranks, the same result at any number of them.

It changes nothing of training: no gradient, no random number, no compiled graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sgt_ds.config import EvaluationConfig, RunConfig
from sgt_ds.data import TokenSet
from sgt_ds.errors import in_field
from sgt_ds.evaluation import (
    METRICS,
    Logits,
    PerplexityProbe,
    Suite,
    TaskResult,
    TrainingEncoder,
    load_questions,
    named_tasks,
    streams_of,
    write_items,
)
from sgt_ds.model import LoopInputs
from sgt_ds.training.engine import Ranks
from sgt_ds.training.heartbeat import Heartbeat

log = logging.getLogger(__name__)

Scores = dict[str, dict[str, float]]
"""By task or text, then by metric."""


class Evaluation:
    """What a run is scored on, read and cut into batches once. `items_folder`: for item results."""

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        suite: Suite | None,
        probes: Mapping[str, PerplexityProbe],
        items_folder: Path,
        heartbeat: Heartbeat,
    ) -> None:
        self._model, self._ranks, self._heartbeat = model, ranks, heartbeat
        self._suite, self._probes = suite, probes
        self._items_folder = items_folder

    def __call__(self, step: int, loops: Mapping[int, LoopInputs]) -> Scores:
        """Scores of the current weights; rank 0 writes the items. Collective."""
        share = slice(self._ranks.rank, None, self._ranks.world_size)
        device, scores = self._ranks.device, Scores()

        def logits(ids: Tensor, first: int) -> Tensor:
            answer: Tensor = self._model(ids, loops=loops).logits
            return answer[:, first:]

        def whole(score: Callable[..., Tensor], answers: Logits) -> Tensor:
            values = score(answers, device, share=share, on_batch=lambda _: self._heartbeat.moved())
            with self._heartbeat.waiting():
                # Each entry is some rank's and 0 elsewhere: the sum is exact, whatever its order.
                dist.all_reduce(values, group=self._ranks.host_group)
            return values

        with _as_exported(self._model):
            if self._suite is not None:
                results = self._suite.results(whole(self._suite.score, logits))
                scores |= {result.task: _scores_of(result) for result in results}
                if self._ranks.is_main:
                    self._write_items(step, results)
            for name, probe in self._probes.items():
                found = probe.result(whole(probe.score, logits))
                scores[name] = {
                    "loss": found.loss,
                    "perplexity": found.perplexity,
                    "bits_per_byte": found.bits_per_byte,
                }
        return scores

    def _write_items(self, step: int, results: Sequence[TaskResult]) -> None:
        path = self._items_folder / f"step-{step:08d}.jsonl"
        try:
            write_items(path, results)
        except OSError as error:
            log.warning("step %d: %s was not written (%s)", step, path, error.strerror)


def build_evaluation(
    config: RunConfig,
    model: Any,
    ranks: Ranks,
    token_set: TokenSet,
    items_folder: Path,
    heartbeat: Heartbeat,
) -> Evaluation | None:
    """The run's evaluation, None where nothing is named. `token_set`: whose tokenizer trains.

    Collective. Raises: UserError where a file is missing, or rows are of another form.
    """
    settings = config.evaluation
    if not settings.tasks and not settings.perplexity:
        return None
    length = config.data.sequence_length

    def parts() -> tuple[Suite | None, dict[str, PerplexityProbe]]:
        encoder = TrainingEncoder.of_set(token_set)
        return _suite(settings, encoder, length), _probes(config, encoder)

    def check() -> None:
        parts()

    ranks.on_main(check)  # finds what is wrong for all of them; then each reads for itself
    return Evaluation(model, ranks, *parts(), items_folder, heartbeat)


def _suite(settings: EvaluationConfig, encoder: TrainingEncoder, length: int) -> Suite | None:
    questions = []
    # The names have been told with the file in which they stand, before the ranks met.
    for key, source, task in named_tasks(settings, "configuration"):
        with in_field(f"{key}.path"):
            questions.append(
                load_questions(
                    task, settings.rule, source.path, split=source.split, limit=source.limit
                )
            )
    if not questions:
        return None
    return Suite(questions, encoder, positions=length, batch_tokens=settings.batch_tokens)


def _probes(config: RunConfig, encoder: TrainingEncoder) -> dict[str, PerplexityProbe]:
    data = config.data
    probes = {}
    for index, source in enumerate(config.evaluation.perplexity):
        with in_field(f"evaluation.perplexity.{index}.path"):
            probes[source.name] = PerplexityProbe(
                streams_of(source.path, encoder, tokens=source.tokens, cache_dir=data.cache_dir),
                window=data.sequence_length,
                length=data.sequence_length,
                batch_tokens=config.evaluation.batch_tokens,
            )
    return probes


def _scores_of(result: TaskResult) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in METRICS:
        score = result.score(metric)
        found[metric] = score.value
        if len(result.items) > 1:
            found[f"{metric}_stderr"] = score.stderr
    return found


@contextmanager
def _as_exported(model: Any) -> Iterator[None]:
    """Blocks run as they are: each length would be a graph of its own, and crowd out training's.

    Nor in float8: an export has none, and one factor for a whole batch would let a score depend on
    what else is in it.
    """
    as_trained = model.compile_blocks, model.fp8
    model.compile_blocks = model.fp8 = False
    try:
        with torch.no_grad():
            yield
    finally:
        model.compile_blocks, model.fp8 = as_trained
