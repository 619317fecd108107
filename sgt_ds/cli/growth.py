"""`sgt-ds growth`: replay, explain, compare and freeze the growth of a run, from its journal."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_group, print_json
from sgt_ds.cli.growth_rollback import add_rollback
from sgt_ds.cli.growth_settings import add_settings, policy_of
from sgt_ds.cli.growth_table import HEADER, print_loops, row_of
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sgt_ds.config import GrowthConfig
    from sgt_ds.growth import Decision, DecisionLine, Header, Line, Phase, Policy, State


def register(commands: Subparsers[Parser]) -> None:
    """Add the commands."""
    group = add_group(commands, "growth", "Replay, explain, compare, freeze and roll back growth.")
    replaying = add_command(
        group,
        "replay",
        "Print each change of loops that a policy derives from journalled entropies.",
        "sgt-ds growth replay entropies.jsonl --k-max 3 --layers 3 --heads 2 "
        "--t-start 250 --interval 250 --json",
        replay,
    )
    replaying.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help='a run\'s growth.jsonl, or plain lines {"step": t, "entropy": [[head...] per layer]}',
    )
    add_settings(replaying, plain_lines=True)
    replaying.add_argument("--json", action="store_true", help="print JSON Lines")
    showing = add_command(
        group,
        "show",
        "Print what grew in a run, when and why.",
        "sgt-ds growth show runs/573m-sgt",
        show,
    )
    _add_run(showing, "run")
    showing.add_argument("--json", action="store_true", help="print one JSON document")
    guessing = add_command(
        group,
        "what-if",
        "Estimate how a run would have grown under another policy, and its FLOPs.",
        "sgt-ds growth what-if runs/573m-sgt --k-max 2 --interval 100",
        what_if,
    )
    _add_run(guessing, "run")
    add_settings(guessing)
    guessing.add_argument("--json", action="store_true", help="print one JSON document")
    differing = add_command(
        group,
        "diff",
        "Print the first step at which the growth of two runs diverges, and why.",
        "sgt-ds growth diff runs/a runs/b",
        diff,
    )
    _add_run(differing, "run_a")
    _add_run(differing, "run_b")
    differing.add_argument("--json", action="store_true", help="print one JSON document")
    freezing = add_command(
        group,
        "freeze",
        "Freeze the growth of a live run, from its next step on.",
        "sgt-ds growth freeze runs/573m-sgt",
        freeze,
    )
    freezing.add_argument("run", type=Path, metavar="RUN", help="run directory")
    add_rollback(group)


def replay(options: argparse.Namespace) -> None:
    """Print one line a change."""
    from sgt_ds.growth import change_as_json
    from sgt_ds.growth import replay as changes

    policy, growth, lines, own = policy_of(options.file, options)
    taken = changes(lines, policy, growth.entropy_ema, obey_operator=own)
    for number, decision in enumerate(taken):
        if options.json:
            print_json(change_as_json(decision))
            continue
        if number == 0:
            print(HEADER)
        print(row_of(decision))


def show(options: argparse.Namespace) -> None:
    """Print the decisions of a run as a table."""
    from sgt_ds.growth import NOISE_STANDARD_ERRORS, loops_as_json

    found = _growth_of(options.run)
    if options.json:
        print_json(found.as_json())
        return
    taken, phase = found.taken, found.phase
    print(f"{found.path}: {found.method}, step {found.step:,}, phase {phase}")
    if found.first_gap is not None:
        print(f"lines before step {found.first_gap} are missing; restore the journal from a copy")
    if not taken:
        print("no decision yet" if phase != "fixed" else "this method decides nothing")
        print_loops(loops_as_json(found.state))
        return
    print(HEADER)
    for line in taken:
        print(row_of(line.decision))
    print(
        "margin: standard errors between the last one chosen (l layer, h head) and the first "
        "left out"
    )
    if found.within_noise:
        steps = ", ".join(str(step) for step in found.within_noise)
        print(f"within noise (a margin below {NOISE_STANDARD_ERRORS:g}): {steps}")
    for cause, count in found.stalls.items():
        print(f"stalled: {count} × {cause}")


@dataclass(frozen=True)
class _Growth:
    """What a run's journal says of its growth so far."""

    path: Path
    method: str
    step: int
    """Of the newest line."""
    phase: Phase
    state: State
    taken: list[DecisionLine]
    stalls: dict[str, int]
    """How often each cause has stalled it."""
    within_noise: list[int]
    """Steps of decisions whose margin is."""
    first_gap: int | None

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        from sgt_ds.growth import loops_as_json

        return {
            "journal": str(self.path),
            "method": self.method,
            "step": self.step,
            "phase": self.phase,
            "growing_layer": self.state.growing_layer,
            "loops": loops_as_json(self.state),
            "decisions": [{**line.decision.as_json(), "flops": line.flops} for line in self.taken],
            "stalls": self.stalls,
            "within_noise": self.within_noise,
            "first_gap": self.first_gap,
        }


def _growth_of(run: Path) -> _Growth:
    """Read a run's journal. Raises: UserError where it has none."""
    from collections import Counter

    from sgt_ds.growth import Continuity, DecisionLine, build_policy

    path, header, lines = _run_journal(run)
    policy = build_policy(header.method, header.growth, header.model)
    seen = Continuity(policy.initial_state(), header.growth.entropy_every)
    taken, last = [], 0
    for line in lines:
        seen.see(line)
        if isinstance(line, DecisionLine):
            taken.append(line)
            last = line.decision.step
        else:
            last = line.step
    state = seen.state
    frozen = bool(taken) and taken[-1].decision.phase == "fixed"
    return _Growth(
        path,
        header.method,
        last,
        phase="fixed" if frozen else policy.phase(last, state),
        state=state,
        taken=taken,
        stalls=dict(
            Counter(line.decision.cause for line in taken if line.decision.rule == "stall")
        ),
        within_noise=[
            line.decision.step
            for line in taken
            if line.decision.margin is not None and line.decision.margin.within_noise
        ],
        first_gap=seen.gap,
    )


def what_if(options: argparse.Namespace) -> None:
    """Print the run's own growth beside the one that the flags ask for, with FLOPs."""
    from sgt_ds.growth import Measurement, build_policy, change_as_json, loops_as_json
    from sgt_ds.growth import replay as changes

    path, header, lines = _run_journal(options.run)
    original = build_policy(header.method, header.growth, header.model)
    measured = list(lines)
    last = max((line.step for line in measured if isinstance(line, Measurement)), default=0)
    policy, growth, _, own = policy_of(path, options)
    results = []
    for name, which, settings, obey in (
        ("this run", original, header.growth, True),
        ("what if", policy, growth, own),
    ):
        taken = list(changes(measured, which, settings.entropy_ema, obey_operator=obey))
        spent = _flops(path, header, which, settings, taken, last)
        results.append((name, loops_as_json(which.initial_state()), taken, spent))
    if options.json:
        print_json(
            {
                "estimate": True,
                "steps": last,
                **{
                    name.replace(" ", "_"): {
                        "from_the_start": loops,
                        "changes": [change_as_json(decision) for decision in taken],
                        **spent,
                    }
                    for name, loops, taken, spent in results
                },
            }
        )
        return
    print(f"ESTIMATE from {path}, {last:,} steps: under another policy the entropies themselves")
    print("would have been different from the first changed loop on.")
    for name, loops, taken, spent in results:
        total, ratio = spent["total_flops"], spent["overhead_ratio"]
        print(f"{name}: {total:.4g} FLOPs, overhead {100 * ratio:.2f}%, {_number(loops, taken)}")
        print_loops(loops)
        if taken:
            print(HEADER)
        for decision in taken:
            print(row_of(decision))
    if policy.phase(last, policy.initial_state()) == "warmup":
        print(
            f"nothing is decided before update {growth.t_start:,} (t_start), and the journal ends "
            f"at {last:,}; give a smaller --t-start"
        )


def diff(options: argparse.Namespace) -> None:
    """Print where two runs part."""
    from sgt_ds.growth import compare, journal_in

    found = compare(journal_in(options.run_a), journal_in(options.run_b))
    divergence = found.divergence
    if options.json:
        print_json(
            {
                "settings": {key: list(pair) for key, pair in found.settings.items()},
                "statistics_step": found.statistics_step,
                "largest_difference": found.largest_difference
                if math.isfinite(found.largest_difference)
                else None,
                "step": None if divergence is None else divergence.step,
                "cause": None if divergence is None else divergence.cause,
                "decisions": None
                if divergence is None
                else [
                    None if taken is None else taken.as_json()
                    for taken in (divergence.first, divergence.second)
                ],
                "compared_to": found.compared_to,
            }
        )
        return
    for key, (one, other) in found.settings.items():
        print(f"setting {key}: {one} | {other}")
    if found.statistics_step is None:
        print("statistics: equal at every step that both measured")
    else:
        where = "" if found.place is None else f" (layer {found.place[0]}, head {found.place[1]})"
        print(
            f"statistics: differ from step {found.statistics_step}, "
            f"by {found.largest_difference:.3g} at most{where}"
        )
    if divergence is None:
        print(f"loops: the same at every step, up to {found.compared_to}")
        return
    print(f"loops: diverge at step {divergence.step}, cause: {divergence.cause}")
    for run, taken in ((options.run_a, divergence.first), (options.run_b, divergence.second)):
        print(f"  {run}: {'no decision' if taken is None else row_of(taken).strip()}")


def freeze(options: argparse.Namespace) -> None:
    """Leave the request. Raises: UserError where nothing is left to freeze."""
    from sgt_ds.errors import UserError
    from sgt_ds.growth import find_journal, request_freeze
    from sgt_ds.launch import check_not_complete

    check_not_complete(options.run, "to freeze")
    begun = options.run.is_dir() and find_journal(options.run) is not None
    if begun and _growth_of(options.run).phase == "fixed":
        message = "its growth has ended (phase fixed); there is nothing to freeze"
        raise UserError(options.run, None, message)
    request = request_freeze(options.run)
    print(
        f"asked {options.run} to freeze its growth; this takes effect at the next update; until "
        f"then remove {request} to cancel, afterwards use `sgt-ds growth rollback`"
    )


def _add_run(parser: Parser, name: str) -> None:
    parser.add_argument(
        name, type=Path, metavar=name.upper(), help="run directory, or a growth journal"
    )


def _run_journal(run: Path) -> tuple[Path, Header, Iterator[Line]]:
    """A run's own journal, with its header. Raises: UserError where it has none."""
    from sgt_ds.errors import UserError
    from sgt_ds.growth import journal_in, read_journal

    path = journal_in(run)
    header, lines = read_journal(path, live=True)
    if header is None:
        raise UserError(
            path,
            "line 1",
            "is not a journal header; give a run or its growth.jsonl (for plain lines use growth "
            "replay)",
        )
    return path, header, lines


def _flops(
    path: Path,
    header: Header,
    policy: Policy,
    growth: GrowthConfig,
    taken: list[Decision],
    steps: int,
) -> dict[str, Any]:
    """FLOPs of `steps` updates with the loops that `taken` leaves, entries included."""
    from sgt_ds.errors import UserError
    from sgt_ds.flops import FlopsCounter
    from sgt_ds.growth import passes_at

    try:
        sequence_length = int(header.values["sequence_length"])
        tokens = sequence_length * int(header.values["global_batch_size"])
    except KeyError as error:
        raise UserError(path, "line 1", f"the header lacks {error}; FLOPs need it") from None
    counter = FlopsCounter(header.model, sequence_length)
    changes = {decision.step: decision.after for decision in taken}
    state = policy.initial_state()
    for step in range(steps):
        state = changes.get(step, state)
        passes = passes_at(
            state,
            step,
            entry=policy.entry,
            interval=growth.interval,
            num_heads=header.model.num_heads,
        )
        counter.add(tokens, passes)
    return {"total_flops": counter.total, "overhead_ratio": counter.overhead_ratio}


def _number(loops: dict[str, Any], taken: list[Decision]) -> str:
    """How much grew; a static method's loops are there from the first update on."""
    if loops and not taken:
        return f"{counted(len(loops), 'looping layer')} from the start"
    return counted(len(taken), "change")
