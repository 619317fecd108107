"""Runs as the parts that write real ones leave them, and the report's page read as a tree."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree.ElementTree import Element

import html5lib

from sgt_ds.cli import main
from sgt_ds.config import PRESETS, GrowthConfig
from sgt_ds.flops import FlopsCounter
from sgt_ds.growth import EntropyAverage, Journal, Measurement, build_policy, passes_at

MODEL = PRESETS["tiny"]  # 6 layers of 4 heads
GROWTH = {"k_max": 2, "layers": 2, "heads": 2, "t_start": 40, "interval": 20, "entropy_ema": 0.5}
STEPS, SEQUENCE, BATCH = 200, 64, 8
# What these entropies lead to, by hand: layers 4 and 2 stand highest, in both heads 1 and 3.
ENTROPY = [
    [0.30 + 0.4 * (layer in (2, 4)) + 0.2 * (head % 2) for head in range(4)] for layer in range(6)
]
LOOPS = {(4, 40, 60, 1), (4, 60, 120, 2), (2, 80, 100, 1), (2, 100, 120, 2)}


def write_run(folder: Path, method: str = "sgt", until: int = 120, worse: float = 0.0) -> Path:
    """A run that has come to step `until`, by the parts that write real ones."""
    (folder / "logs").mkdir(parents=True)
    growth = GrowthConfig.model_validate(GROWTH if method == "sgt" else {})
    header = {
        "method": method,
        "growth": growth.model_dump(mode="json"),
        "model": MODEL.model_dump(),
        "sequence_length": SEQUENCE,
        "global_batch_size": BATCH,
        "steps": STEPS,
    }
    policy, average = build_policy(method, growth, MODEL), EntropyAverage(growth.entropy_ema)
    state, flops = policy.initial_state(), FlopsCounter(MODEL, SEQUENCE)
    rows = []
    with Journal.create(folder / "growth.jsonl", header) as journal:
        for step in range(1, until + 1):
            passes = passes_at(
                state, step - 1, entry=policy.entry, interval=growth.interval, num_heads=4
            )
            flops.add(BATCH * SEQUENCE, passes)
            error = tuple((0.001,) * 4 for _ in range(6))
            measured = Measurement(step, tuple(tuple(heads) for heads in ENTROPY), error, BATCH)
            journal.measure(measured)
            entropy = average.update(measured)
            if policy.is_due(step, state):
                decision = policy.decide(step, entropy, state)
                journal.decision(decision, flops.total)
                state = decision.after
            if step % 10 == 0:
                rows.append(
                    {
                        "step": step,
                        "tokens": step * BATCH * SEQUENCE,
                        "loss": 2 + 4 / step,
                        "learning_rate": 1e-3,
                        "grad_norm": 1.0,
                        "step_seconds": 0.5,
                        "tokens_per_second": 1024.0,
                        "flops": flops.total,
                        "overhead_ratio": flops.overhead_ratio,
                        "phase": policy.phase(step, state),
                    }
                )
            if step % 40 == 0:
                rows.append({"step": step, "validation_loss": 3 - step / 100 + worse})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = [
        {"time": 1.75e9, "step": 0, "reached": None, "world_size": 2, "host": "node-1"},
        {"time": 1.76e9, "step": 60, "reached": 87, "world_size": 4, "host": "node-2"},
    ]
    for start in starts:
        start |= {"device": "NVIDIA H200", "software": {"torch": "2.13.0"}}
    (folder / "logs" / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    (folder / "run.yaml").write_text("# comment\nmethod: sgt\n")
    return folder


def report(tmp_path: Path, *runs: Path) -> Element:
    """The document's tree. html5lib, strict, refuses every fault that browsers forgive."""
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    document: Element = parser.parse(out.read_text(encoding="utf-8"))
    return document


def figures(document: Element, title: str) -> list[Element]:
    found = [f for f in document.iter("figure") if text_of(f.find("figcaption/strong")) == title]
    assert found, title
    return found


def text_of(element: Element | None) -> str:
    assert element is not None
    return "".join(element.itertext())


def of_class(element: Element, name: str) -> list[Element]:
    return [e for e in element.iter() if name in e.get("class", "").split()]


def numbers(figure: Element) -> list[list[str]]:
    return [[text_of(cell) for cell in row] for row in figure.findall(".//tbody/tr")]
