"""What the ranks' exporters report: which are up, which is behind, which is slow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sgt_ds.report.access import Access, NoAnswer
from sgt_ds.report.view import RankView
from sgt_ds.telemetry import OWN_PARTS

# A look at the terminal must not weigh on a large run, nor wait for hosts that are gone.
MAX_ASKED = 64
TIMEOUT_SECONDS = 1.0
AT_ONCE = 16
# After a round that took long, the next one waits this many times as long.
REST = 10

_WANTED = {
    "sgt_rank_step": "step",
    "sgt_rank_last_step_timestamp_seconds": "stamp",
    "sgt_step_duration_seconds_count": "updates",
}
_PARTS = "sgt_step_part_seconds_total"


class Ranks:
    """Asks the exporters that a document of scrape targets names, and not too often.

    `targets`: gives the document's text, or None where there is none (yet).
    `scheme`: http or https.
    """

    def __init__(self, targets: Callable[[], str | None], scheme: str, access: Access) -> None:
        self._targets, self._scheme, self._access = targets, scheme, access
        self._ask_again, self._known = 0.0, 0
        self._found: list[RankView] = []

    def read(self) -> tuple[int, Sequence[RankView]]:
        """How many ranks the run has, and those asked, in order; 0 where no one knows."""
        begun = time.monotonic()
        if begun >= self._ask_again:
            addresses = _addresses(self._targets())
            self._known = len(addresses)
            asked = dict(sorted(addresses.items())[:MAX_ASKED])
            with ThreadPoolExecutor(AT_ONCE) as pool:
                self._found = list(pool.map(self._ask, asked, asked.values()))
            ended = time.monotonic()
            self._ask_again = ended + REST * max(0.0, ended - begun - 0.1)
        return self._known, self._found

    def _ask(self, rank: int, address: str) -> RankView:
        try:
            text = self._access.fetch(f"{self._scheme}://{address}/metrics", TIMEOUT_SECONDS)
            samples = [
                sample
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ]
        except (NoAnswer, ValueError):
            return RankView(rank)
        values = {_WANTED[one.name]: one.value for one in samples if one.name in _WANTED}
        own = [one for one in samples if one.name == _PARTS and one.labels["part"] in OWN_PARTS]
        return _view(rank, values, math.fsum(one.value for one in own))


def _view(rank: int, values: Mapping[str, float], work_seconds: float) -> RankView:
    updates = values.get("updates", 0)
    return RankView(
        rank,
        step=int(values["step"]) if "step" in values else None,
        quiet_seconds=max(0.0, time.time() - values["stamp"]) if "stamp" in values else None,
        work_seconds=work_seconds / updates if updates and work_seconds else None,
    )


def _addresses(document: str | None) -> dict[int, str]:
    """host:port by rank; entries that are none are left out: a run may just be writing them."""
    try:
        groups: Any = json.loads(document or "[]")
        return {
            int(group["labels"]["rank"]): str(group["targets"][0])
            for group in groups
            if "/" not in str(group["targets"][0])
        }
    except (ValueError, TypeError, KeyError, IndexError):
        return {}
