"""Growth: Θ, the policies that change it (pure), the journal, and the controller used in training.

`GrowthController` needs torch and is loaded when it is first asked for; the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgt_ds.growth.compare import Comparison, Divergence, compare
from sgt_ds.growth.decision import (
    NOISE_STANDARD_ERRORS,
    Decision,
    Margin,
    Phase,
    Rule,
    loops_as_json,
)
from sgt_ds.growth.entry import Passes, is_narrow, passes_at
from sgt_ds.growth.journal import Journal, journal_header, kept_part, settled_growth
from sgt_ds.growth.layers import resolve_growth
from sgt_ds.growth.lines import (
    JOURNAL_NAME,
    DecisionLine,
    Header,
    Line,
    check_shape,
    find_journal,
    journal_in,
    read_journal,
)
from sgt_ds.growth.majority import odd_ranks
from sgt_ds.growth.policy import POLICIES, Policy, build_policy, check_method
from sgt_ds.growth.replay import (
    Continuity,
    change_as_json,
    check_whole,
    continuity,
    decisions,
    replay,
)
from sgt_ds.growth.requests import request_freeze
from sgt_ds.growth.state import VANILLA, Loop, Scope, State
from sgt_ds.growth.statistics import Entropy, EntropyAverage, Measurement, averaged
from sgt_ds.lazy import lazy_exports

if TYPE_CHECKING:
    from sgt_ds.growth.controller import GrowthController

__all__ = [
    "JOURNAL_NAME",
    "NOISE_STANDARD_ERRORS",
    "POLICIES",
    "VANILLA",
    "Comparison",
    "Continuity",
    "Decision",
    "DecisionLine",
    "Divergence",
    "Entropy",
    "EntropyAverage",
    "GrowthController",
    "Header",
    "Journal",
    "Line",
    "Loop",
    "Margin",
    "Measurement",
    "Passes",
    "Phase",
    "Policy",
    "Rule",
    "Scope",
    "State",
    "averaged",
    "build_policy",
    "change_as_json",
    "check_method",
    "check_shape",
    "check_whole",
    "compare",
    "continuity",
    "decisions",
    "find_journal",
    "is_narrow",
    "journal_header",
    "journal_in",
    "kept_part",
    "loops_as_json",
    "odd_ranks",
    "passes_at",
    "read_journal",
    "replay",
    "request_freeze",
    "resolve_growth",
    "settled_growth",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "controller": ("GrowthController",),
    },
)
