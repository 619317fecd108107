"""Growth during training: reduce over ranks, decide on rank 0, broadcast, verify on all.

The only module of this package that uses torch.distributed. It knows no model: the trainer hands in
sums and reads Θ. Sums travel on the default process group; everything that a host must read
(states, hashes) on a gloo group, so that no accelerator has to be waited for.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sgt_ds.config import GrowthConfig, ModelConfig
from sgt_ds.errors import StateMismatch
from sgt_ds.growth.decision import OPERATOR, Decision, Phase, freeze, stall
from sgt_ds.growth.entry import Passes, passes_at
from sgt_ds.growth.journal import Journal
from sgt_ds.growth.majority import odd_ranks
from sgt_ds.growth.policy import Policy
from sgt_ds.growth.state import State
from sgt_ds.growth.statistics import (
    Entropy,
    EntropyAverage,
    measurement_of,
)

log = logging.getLogger(__name__)


class _Queued(NamedTuple):
    """Totals of one update on their way: valid once `work` is done."""

    step: int
    sums: Tensor
    work: dist.Work | None


class GrowthController:
    """Holds Θ on every rank and moves it, the same way on all of them.

    `step` is always the count of applied updates: an update that was skipped is never observed,
    and a window that falls on the last update is decided like any other.
    """

    def __init__(
        self,
        policy: Policy,
        growth: GrowthConfig,
        model: ModelConfig,
        *,
        journal: Journal | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        writes: Callable[[], None] = lambda: None,
    ) -> None:
        """`journal`: on global rank 0 only. `group`: gloo, over all ranks; None: one process.

        `writes`: told on every rank before rank 0's journal may wait for its disk.
        """
        self.policy = policy
        self.state = policy.initial_state()
        self.entropy: Entropy | None = None
        """Moving average as of the newest measurement that was drained."""
        self.not_finite = 0
        """Measured updates so far in which some head's entropy was not finite."""
        self.collective_seconds = 0.0
        """Time that this rank has spent in collectives that the host waits for."""
        self.journal = journal
        self._writes = writes
        self._growth, self._num_heads = growth, model.num_heads
        self._shape = (model.num_layers, model.num_heads, 3)
        self._group, self._device = group, torch.device(device)
        self._average = EntropyAverage(growth.entropy_ema)
        self._queue: list[_Queued] = []
        self._measured_step = -1
        self._frozen_from: int | None = None

    def measures(self, step: int) -> bool:
        """Whether the update that makes the count `step` + 1 measures entropies."""
        return (step + 1) % self._growth.entropy_every == 0

    def passes(self, step: int) -> dict[int, Passes]:
        """What each looping layer runs in the update after `step` applied ones."""
        return passes_at(
            self.state,
            step,
            entry=self.policy.entry,
            interval=self._growth.interval,
            num_heads=self._num_heads,
        )

    def phase(self, step: int) -> Phase:
        """The phase at `step`, an operator's freeze included."""
        return "fixed" if self._frozen_from is not None else self.policy.phase(step, self.state)

    @property
    def frozen(self) -> bool:
        """Whether an operator has frozen growth."""
        return self._frozen_from is not None

    def observe(self, step: int, sums: Tensor) -> None:
        """Take in what the update that made the count `step` measured, without waiting for it.

        `sums`: float64 (layers, heads, 3) = sum, sum of squares, count over the sequences of this
        rank, all micro-batches. Collective: every rank calls it for the same steps. The tensor is
        copied, and read by the host only when something asks for it.
        """
        if tuple(sums.shape) != self._shape:
            raise ValueError(f"sums have shape {tuple(sums.shape)}, not {self._shape}")
        total = sums.detach().to(device=self._device, dtype=torch.float64, copy=True)
        work = dist.all_reduce(total, async_op=True) if self._group is not None else None
        self._queue.append(_Queued(step, total, work))

    def decide(self, step: int, flops: int) -> Decision | None:
        """Move Θ where `step` is due; the new Θ acts from the next update. `flops`: spent so far.

        Collective. Returns the decision on every rank, or None where none is due.
        Raises: StateMismatch, naming the ranks that hold another Θ.
        """
        if self._frozen_from is not None:
            return None
        due = self.policy.is_due(step, self.state)
        # A rank with another Θ may find nothing due where the others wait for it: the clock
        # alone, which is the same everywhere, brings all of them to the check.
        if not due and not self.policy.is_due(step, self.policy.initial_state()):
            return None
        self.verify()
        if not due:
            return None
        self.drain()
        decision = None
        if self._rank == 0:
            entropy = self.entropy if self._measured_step == step else None
            decision = self.policy.decide(step, entropy, self.state)
        decision = self._broadcast(decision)
        self.state = decision.after
        self.verify()
        self._note(decision, flops)
        return decision

    def freeze(self, step: int, flops: int) -> Decision | None:
        """Stop growth for good at a person's wish: no later window decides anything.

        Every rank calls it at the same step. Returns the journalled decision, or None where growth
        had ended already. An entry under way still ends.
        """
        if self.phase(step) == "fixed":
            return None
        self.drain()
        decision = freeze(step, f"{OPERATOR}: growth was frozen on request", self.state)
        self._frozen_from = step
        self._note(decision, flops)
        return decision

    def drain(self) -> None:
        """Wait for what was observed, and bring it into the moving average and the journal."""
        if not self._queue:
            return
        with self._collective():
            for queued in self._queue:
                if queued.work is not None:
                    queued.work.wait()
        # One copy to the host for the whole queue.
        faults: list[tuple[int, int, int]] = []
        totals = torch.stack([queued.sums for queued in self._queue]).cpu().numpy()
        for queued, sums in zip(self._queue, totals, strict=True):
            measurement = measurement_of(queued.step, sums)
            self.entropy = self._average.update(measurement)
            self._measured_step = queued.step
            if self.journal is not None:
                self.journal.measure(measurement)
            if (place := measurement.first_not_finite()) is not None:
                self.not_finite += 1
                faults.append((queued.step, *place))
        self._queue.clear()
        if faults and self.journal is not None:
            # One line for what was read at once: a NaN may come with every update from now on.
            log.warning(
                "step %d: the entropy of layer %d, head %d is not finite; "
                "%d of the newest %d measured updates have such heads",
                *faults[-1],
                len(faults),
                len(totals),
            )

    def flush(self) -> None:
        """As `drain`, and into the journal's file."""
        self.drain()
        self._writes()
        if self.journal is not None:
            self.journal.flush()

    def verify(self) -> None:
        """Check that all ranks hold the same Θ. Collective.

        Raises: StateMismatch, naming the ranks that differ from most (from the lowest rank's
        where there is no majority).
        """
        if self._group is None:
            return
        own = torch.tensor(list(bytes.fromhex(self.state.digest())), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        with self._collective():
            dist.all_gather(gathered, own, group=self._group)
        digests = [bytes(found.tolist()) for found in gathered]
        odd, _ = odd_ranks(digests)
        if odd:
            ranks = ", ".join(str(rank) for rank in odd)
            raise StateMismatch(
                f"rank{'s' if len(odd) > 1 else ''} {ranks} of {len(digests)} "
                f"hold{'' if len(odd) > 1 else 's'} a different architectural state from the "
                "others; resume from the last checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values for JSON, the journal synced.

        Waits for the queue.
        """
        self.drain()
        self._writes()
        if self.journal is not None:
            self.journal.sync()
        return {
            "state": self.state.as_json(),
            "hash": self.state.digest(),
            "average": self._average.state_dict(),
            "measured_step": self._measured_step,
            "latest": None if self.entropy is None else self.entropy.as_json(),
            "frozen_from": self._frozen_from,
            "not_finite": self.not_finite,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Raises: KeyError, TypeError, ValueError."""
        self.state = State.from_json(values["state"])
        self._average.load_state_dict(values["average"])
        self._measured_step = int(values["measured_step"])
        latest = values["latest"]
        self.entropy = None if latest is None else Entropy.from_json(latest)
        self._frozen_from = values["frozen_from"]
        self.not_finite = int(values.get("not_finite", 0))
        self._queue.clear()

    def fork(self, values: Mapping[str, Any]) -> None:
        """Start this policy from another run's `state_dict`: its entropies, none of its loops.

        Where a window falls on that very step, `decide` called next finds its measurement.
        """
        self.load_state_dict(values)
        self.state, self._frozen_from = self.policy.initial_state(), None

    def note_missing_lines(self, step: int, flops: int) -> bool:
        """Journal Θ at a resume whose journal lacks lines. Returns whether it does.

        Raises: UserError where a line is damaged.
        """
        if self.journal is None or self.journal.leads_to(self.state, self._measured_step):
            return False
        reason = "journal: lines are missing before this one"
        # Without `_note`: other ranks enter no part here.
        self.journal.decision(stall(step, reason, self.state, self.phase(step)), flops)
        return True

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    def _broadcast(self, decision: Decision | None) -> Decision:
        """Rank 0's decision, on every rank, as the canonical JSON text that all read."""
        if self._group is None:
            if decision is None:
                raise ValueError("one process decides by itself")
            return decision
        text = b"" if decision is None else _canonical(decision)
        size = torch.tensor([len(text)], dtype=torch.int64)
        source = dist.get_global_rank(self._group, 0)
        with self._collective():
            dist.broadcast(size, source, group=self._group)
            if decision is None:
                content = torch.empty(int(size), dtype=torch.uint8)
            else:
                content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(content, source, group=self._group)
        return Decision.from_json(json.loads(content.numpy().tobytes()))

    @contextmanager
    def _collective(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.collective_seconds += time.perf_counter() - started

    def _note(self, decision: Decision, flops: int) -> None:
        self._writes()
        if self.journal is not None:
            self.journal.decision(decision, flops)


def _canonical(decision: Decision) -> bytes:
    return json.dumps(decision.as_json(), sort_keys=True, separators=(",", ":")).encode()
