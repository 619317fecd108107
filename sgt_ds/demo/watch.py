"""One look at a run from outside: scrape its exporters as Prometheus does. Knows no step."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class Scrape:
    """What the exporters of a run said at one moment."""

    ports: list[int]
    rank_steps: list[int]
    """Applied updates by each rank's own exporter."""
    phase: str
    overhead_ratio: float
    layer_entropies: list[float]
    """Mean over the heads, 0–1; empty before the first measurement."""
    loop_depths: dict[str, int]
    """Depth by layer, of those that loop."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        entropies = " ".join(f"{value:.3f}" for value in self.layer_entropies)
        loops = " ".join(f"{layer}×{depth}" for layer, depth in self.loop_depths.items())
        return "  ".join(
            (
                f"ports {', '.join(map(str, self.ports))}: step {self.rank_steps[0]}",
                f"phase {self.phase}",
                f"loops {loops or 'none'}",
                f"FLOPs overhead +{self.overhead_ratio:.2%}",
                f"layer entropies {entropies or 'not yet'}",
            )
        )


def scrape(host: str, ports: list[int]) -> Scrape | None:
    """What the exporters say now; None while one of them does not answer."""
    try:
        samples = [_samples(f"http://{host}:{port}/metrics") for port in ports]
        run_wide = samples[0]
        phases = [labels["phase"] for labels, value in run_wide["sgt_growth_phase"] if value == 1]
        return Scrape(
            ports=ports,
            rank_steps=[int(one["sgt_rank_step"][0][1]) for one in samples],
            phase=phases[0],
            overhead_ratio=run_wide["sgt_flops_overhead_ratio"][0][1],
            layer_entropies=[
                value
                for _, value in sorted(
                    run_wide.get("sgt_layer_entropy_ratio", []),
                    key=lambda sample: int(sample[0]["layer"]),
                )
            ],
            loop_depths={
                labels["layer"]: int(depth)
                for labels, depth in run_wide.get("sgt_loop_depth", [])
                if depth
            },
        )
    except (OSError, KeyError, IndexError):  # not up yet, or nothing published yet
        return None


def _samples(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found
