"""Tables of a report: the runs side by side, planned against measured, restarts, environment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from statistics import median

from sgt_ds.progress import duration
from sgt_ds.report.history import RunHistory, Start
from sgt_ds.report.html.frame import table
from sgt_ds.report.html.markup import Markup, tag
from sgt_ds.report.html.scale import percent, significant
from sgt_ds.report.html.story import loops_now

UNKNOWN = "–"
# Losses of single batches jump about: what stands in the summary is a mean of the last logged ones.
MAX_LOGGED = 20


def summary(runs: Sequence[RunHistory]) -> Markup:
    """One column a run, one row a fact."""
    facts: tuple[tuple[str, Callable[[RunHistory], str]], ...] = (
        ("method", lambda run: run.method),
        ("model", _model),
        ("progress", _progress),
        ("phase", lambda run: run.updates[-1].phase or UNKNOWN if run.updates else UNKNOWN),
        ("loops", loops_now),
        ("training loss, latest updates", _training_loss),
        ("validation loss", _validation_loss),
        ("tokens", lambda run: significant(run.updates[-1].tokens) if run.updates else UNKNOWN),
        ("FLOPs", lambda run: significant(run.updates[-1].flops) if run.updates else UNKNOWN),
        ("FLOPs beyond vanilla", _overhead),
        ("tokens per second, median", _speed),
        ("time left at that speed", _time_left),
        ("restarts", _restart_count),
        ("last line written", lambda run: f"{duration(run.age_seconds)} before this report"),
    )
    rows = [(name, *(value(run) for run in runs)) for name, value in facts]
    return tag("div", table(("", *(run.name for run in runs)), rows), class_="scroll wide")


def planned_and_measured(run: RunHistory) -> Markup | None:
    """FLOPs at the newest row, as planned and as counted; None without a plan or a row."""
    if run.planned is None or not run.updates:
        return None
    recipe, newest = run.planned.recipe, run.updates[-1]
    vanilla = newest.step * recipe.global_batch_size * recipe.sequence_length
    vanilla *= run.planned.earliest.vanilla_flops_per_token
    outcomes = (
        ("planned, growth at every window", run.planned.earliest),
        ("planned, with this run's growth", run.planned.own),
    )
    rows = []
    for name, outcome in outcomes:
        if outcome is None:
            continue
        overhead = outcome.overhead_at(newest.step)
        rows.append(
            (
                name,
                significant(vanilla * (1 + overhead), 6),
                percent(overhead, 3, signed=True),
                significant(outcome.total_flops, 6),
                percent(outcome.overhead_ratio, 3, signed=True),
            )
        )
    measured = percent(newest.overhead_ratio, 3, signed=True)
    rows.append(("measured", significant(newest.flops, 6), measured, UNKNOWN, UNKNOWN))
    head = (
        "",
        f"FLOPs until step {newest.step:,}",
        "beyond vanilla",
        f"FLOPs until step {recipe.steps:,}",
        "beyond vanilla",
    )
    note = "Skipped updates also cost FLOPs, and are not part of any plan."
    return tag("div", table(head, rows, note=note), class_="scroll wide")


def starts(run: RunHistory) -> Markup:
    """When the processes were started, and how many updates had to be done again."""
    if not run.starts:
        return tag("p", "This run has no record of its starts.", class_="note")
    in_float8 = any(start.values.get("fp8") for start in run.starts)
    rows = [
        (
            _when(start),
            f"{start.step:,}",
            _done_again(start, number),
            str(start.values.get("world_size", UNKNOWN)),
            str(start.values.get("host", UNKNOWN)),
            *(["yes" if start.values.get("fp8") else "no"] if in_float8 else []),
        )
        for number, start in enumerate(run.starts)
    ]
    head = ["started", "at step", "updates repeated", "ranks", "host of rank 0"]
    head += ["float8"] if in_float8 else []
    return tag("div", table(head, rows), class_="scroll wide")


def environment(run: RunHistory) -> Markup:
    """What the newest start ran on."""
    if not run.starts:
        return tag("p", "This run has no record of its environment.", class_="note")
    values = run.starts[-1].values
    software = values.get("software")
    rows = [
        ("device of rank 0", str(values.get("device", UNKNOWN))),
        ("ranks", str(values.get("world_size", UNKNOWN))),
        ("micro-batch", str(values.get("micro_batch_size", UNKNOWN))),
        ("DeepSpeed file", str(values.get("deepspeed_config", UNKNOWN))),
    ]
    if isinstance(software, dict):
        rows += [(str(name), str(found)) for name, found in software.items()]
    if run.header is not None:
        rows.append(("config hash", str(run.header.values.get("config_hash", UNKNOWN))))
    return tag("div", table(("", run.name), rows), class_="scroll wide")


def settings(run: RunHistory) -> Markup | None:
    """The resolved run file, folded; without its comments, and without what a URL may hide."""
    if not run.settings:
        return None
    lines = [line for line in run.settings.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(line for line in lines if line.strip())
    return tag(
        "details",
        tag("summary", f"run.yaml of {run.name}"),
        tag("pre", without_secrets(text)),
    )


def without_secrets(text: str) -> str:
    """URLs without user names, passwords and query strings: reports are passed on."""
    text = re.sub(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", r"\1…@", text)
    return re.sub(r"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*)\?[^\s'\"]*", r"\1?…", text)


def _model(run: RunHistory) -> str:
    if run.header is None:
        return UNKNOWN
    model = run.header.model
    size = f"{significant(run.planned.parameters, 3)} parameters, " if run.planned else ""
    return f"{size}{model.num_layers} layers of {model.num_heads} heads, width {model.hidden_size}"


def _progress(run: RunHistory) -> str:
    if not run.steps:
        return f"step {run.last_step:,}"
    return f"step {run.last_step:,} of {run.steps:,}"


def _training_loss(run: RunHistory) -> str:
    newest = run.updates[-MAX_LOGGED:]
    finite = [update.loss for update in newest if math.isfinite(update.loss)]
    if not finite:
        return UNKNOWN
    steps = f"steps {newest[0].step:,} to {newest[-1].step:,}"
    return f"{math.fsum(finite) / len(finite):.4f} (mean of the {len(finite)} logged in {steps})"


def _validation_loss(run: RunHistory) -> str:
    if not run.validations:
        return UNKNOWN
    newest = run.validations[-1]
    best = min(run.validations, key=lambda one: one.loss if math.isfinite(one.loss) else math.inf)
    text = f"{newest.loss:.4f}"
    if newest.loss < 700:
        text += f" (perplexity {significant(math.exp(newest.loss))})"
    if best.loss < newest.loss:
        text += f"; lowest {best.loss:.4f} at step {best.step:,}"
    return text


def _overhead(run: RunHistory) -> str:
    if not run.updates:
        return UNKNOWN
    newest = run.updates[-1]
    text = percent(newest.overhead_ratio, signed=True)
    if run.planned is not None:
        text += f" (planned {percent(run.planned.earliest.overhead_at(newest.step), signed=True)})"
    return text


def _median_speed(run: RunHistory) -> float:
    found = [one.tokens_per_second for one in run.updates if math.isfinite(one.tokens_per_second)]
    return median(found) if found else math.nan


def _speed(run: RunHistory) -> str:
    return significant(_median_speed(run), 4)


def _time_left(run: RunHistory) -> str:
    speed = _median_speed(run)
    if run.planned is None or not run.updates or not speed > 0:
        return UNKNOWN
    recipe = run.planned.recipe
    left = max(0, recipe.steps - run.last_step)
    seconds = left * recipe.global_batch_size * recipe.sequence_length / speed
    return duration(seconds) if left else "done"


def _restart_count(run: RunHistory) -> str:
    return str(len(run.restarts)) if run.starts else UNKNOWN


def _done_again(start: Start, number: int) -> str:
    if number == 0 or start.reached is None:
        return UNKNOWN if number == 0 else "0"
    return f"{max(0, start.reached - start.step):,}"


def _when(start: Start) -> str:
    try:
        moment = datetime.fromtimestamp(start.time, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
