"""Loss over rows of tokens in sliding windows: perplexity, bits per byte, past the trained length.

Every token of a row but the first is predicted once, whatever window and stride: sums over tokens,
never averages of averages. Knows ids and logits, no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sgt_ds.errors import UserError
from sgt_ds.evaluation.scoring import Logits, Request, plan_batches, token_log_probabilities
from sgt_ds.evaluation.streams import Stream

# Perplexity is exp(loss); from here on it is no float any more.
_LARGEST_LOSS = 700.0


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Loss at one window."""

    window: int
    """Positions that the model sees at once."""
    stride: int
    """Tokens predicted in each window but a row's first."""
    tokens: int
    """Tokens predicted."""
    loss: float
    """Nats per token."""
    bits_per_byte: float
    """Of the text: tokens between documents are left out. Comparable between tokenizers."""
    beyond_loss: float | None
    """Nats per token of those with more than `length` tokens before them; None without any."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < _LARGEST_LOSS else math.inf

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "perplexity": self.perplexity if self.loss < 700 else None}


class PerplexityProbe:
    """Rows cut into windows and batches.

    `length`: what the model was trained at, which tells what lies beyond. `stride`: None takes the
    window, so that windows don't overlap. Raises: UserError where the stride exceeds the window.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        window: int,
        length: int,
        stride: int | None = None,
        batch_tokens: int = 4096,
    ) -> None:
        self.window, self.stride, self.length = window, stride or window, length
        if not 1 <= self.stride <= window:
            raise UserError("--stride", None, f"{stride} is not from 1 to the window, {window}")
        self.requests: list[Request] = []
        self._ends: list[int | None] = []
        for stream in streams:
            row = stream.tokens.tolist()
            for begin, end, scored in windows(len(row), window, self.stride):
                targets = row[end - scored + 1 : end + 1]
                self.requests.append(Request(tuple(row[begin:end]), tuple(targets)))
                self._ends.append(stream.end)
        self._bytes = sum(stream.bytes for stream in streams)
        self.batches = plan_batches(self.requests, batch_tokens)

    def score(
        self,
        logits: Logits,
        device: torch.device,
        *,
        share: slice = slice(None),
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> torch.Tensor:
        """Sums of nats by request, float64 (requests, 3) on the CPU: all, of text, of those beyond.

        0 where a request is not in the share (`slice(rank, None, world_size)`); the tensors of all
        ranks add up to the whole, exactly. `on_batch` hears how many tokens a batch predicted.
        """
        sums = torch.zeros(len(self.requests), 3, dtype=torch.float64)
        for batch in self.batches[share]:
            found = token_log_probabilities(batch, self.requests, logits, device)
            for index, values in found.items():
                one, end = self.requests[index], self._ends[index]
                text = [v for v, t in zip(values, one.targets, strict=True) if t != end]
                for place, part in enumerate((values, text, values[self._within(one) :])):
                    sums[index, place] = -math.fsum(part)
            on_batch(sum(map(len, found.values())))
        return sums

    def result(self, sums: torch.Tensor) -> Perplexity:
        """What the sums of all requests say."""
        counts = [len(one.targets) for one in self.requests]
        beyond = sum(n - self._within(one) for n, one in zip(counts, self.requests, strict=True))
        nats, text_nats, beyond_nats = (math.fsum(column) for column in sums.T.tolist())
        return Perplexity(
            window=self.window,
            stride=self.stride,
            tokens=sum(counts),
            loss=nats / sum(counts),
            bits_per_byte=text_nats / math.log(2) / max(self._bytes, 1),
            beyond_loss=beyond_nats / beyond if beyond else None,
        )

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(len(one.targets) for one in self.requests)

    def _within(self, one: Request) -> int:
        """How many of a request's targets have `length` tokens before them, or fewer."""
        before = len(one.ids) - len(one.targets) + 1  # tokens before the first target
        return min(max(self.length - before + 1, 0), len(one.targets))


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a row of so many tokens: begin and end of the input, and how many are scored.

    The last `scored` positions of [begin, end) predict the tokens up to `end`. A row's first window
    scores all of its own, each later one `stride` new ones behind as much context as fits.
    """
    end = scored = min(window, tokens - 1)
    while scored > 0:
        yield max(0, end - window), end, scored
        scored = min(stride, tokens - 1 - end)
        end += scored
