"""The model card of an export: what it is, how it was trained, how to load it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgt_ds.config import ModelConfig


@dataclass(frozen=True)
class Facts:
    """What the card tells; numbers as counted, not rounded."""

    name: str
    model: ModelConfig
    model_type: str
    method: str
    step: int
    parameters: int
    dtype: str
    checksum: str
    loops: dict[str, dict[str, Any]]
    entering: bool
    tokens: int | None
    sequence_length: int | None
    flops: dict[str, int]
    versions: str


def model_card(facts: Facts) -> str:
    """Markdown with the front matter that model hubs read."""
    shape = facts.model
    rows = [
        ("Parameters", f"{facts.parameters:,}"),
        (
            "Shape",
            f"{shape.num_layers} layers, width {shape.hidden_size}, FFN {shape.intermediate_size}, "
            f"{shape.num_heads} heads, vocabulary {shape.vocab_size}",
        ),
        ("Method", f"`{facts.method}`"),
        ("Optimizer steps", f"{facts.step:,}"),
    ]
    if facts.tokens is not None:
        rows.append(("Tokens", f"{facts.tokens:,}"))
    if facts.sequence_length is not None:
        rows.append(("Sequence length", f"{facts.sequence_length:,}"))
    total, vanilla = facts.flops.get("total"), facts.flops.get("vanilla")
    if total:
        rows.append(("Training FLOPs", f"{total:.4g}"))
    if total and vanilla:
        rows.append(("Overhead over vanilla", f"{100 * (total - vanilla) / vanilla:.3f} %"))
    rows += [
        ("Weights", f"{facts.dtype}, from the float32 master weights"),
        ("Checksum of the masters", f"`{facts.checksum}` (32-bit words summed modulo 2^64)"),
        ("Written by", facts.versions),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"tags: [{facts.model_type}, sparse-growing-transformer]\n---\n\n"
        f"# {facts.name}\n\n{_opening(facts)}\n\n"
        f"| | |\n|---|---|\n{table}\n\n{_loops(facts)}"
        f"## Use\n\n```python\n{_example(facts)}```\n"
    )


def _opening(facts: Facts) -> str:
    if facts.model_type == "llama":
        return (
            "A LLaMA-architecture language model; stock `transformers` loads it without extra code."
        )
    return (
        "A language model of LLaMA architecture in which some layers re-apply some of their "
        "attention heads. `modeling_sgt.py`, next to the weights, holds all the code it needs; it "
        "requires `transformers` 5.23 or later and `trust_remote_code=True`."
    )


def _loops(facts: Facts) -> str:
    if not facts.loops:
        return ""
    lines = [
        f"| {layer} | {loop['depth']} | {loop['scope']} | "
        f"{'all' if loop['heads'] is None else ', '.join(map(str, loop['heads']))} |"
        for layer, loop in facts.loops.items()
    ]
    note = (
        "\nThe checkpoint was taken while a loop was entering: `scale` in `config.json` holds the "
        "factors of that step, so this is exactly the function that the next update would have "
        "used.\n"
        if facts.entering
        else ""
    )
    table = "\n".join(lines)
    return (
        "## Loops\n\nLayers and heads count from 0; depth is the number of extra passes.\n\n"
        f"| Layer | Depth | Scope | Heads |\n|---|---|---|---|\n{table}\n{note}\n"
    )


def _example(facts: Facts) -> str:
    trust = "" if facts.model_type == "llama" else ", trust_remote_code=True"
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("."{trust})\n'
        f'model = AutoModelForCausalLM.from_pretrained("."{trust})\n'
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n"
    )
