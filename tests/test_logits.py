"""Training model, export and a float64 reference give the same logits: every method, every dtype.

`python tests/test_logits.py` prints the largest differences, as docs/inference.md has them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from made_checkpoints import INTERVAL, write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from sgt_ds.config import ModelConfig
from sgt_ds.growth import Loop, State, passes_at
from sgt_ds.inference import convert
from sgt_ds.model import Transformer, loop_inputs

SHAPE = ModelConfig(
    hidden_size=64, intermediate_size=160, num_layers=4, num_heads=4, vocab_size=300, init_std=0.08
)
STEP = 6
SETTLED = Loop(3, (1, 3), "attention", 0, -INTERVAL)
DECAY = State(
    {1: Loop(1, (0, 2), "attention", STEP - 2, STEP - 2, leaving=(1, 3)), 3: SETTLED},
    growing_layer=1,
)
# method, entry, Θ
CASES: dict[str, tuple[str, str, State]] = {
    "vanilla": ("vanilla", "none", State()),
    "sgt": ("sgt", "none", State({2: Loop(2, (0, 2), "attention", 0, 0), 3: SETTLED}, 2)),
    "sgt, entering by decay": ("sgt", "decay", DECAY),
    "sgt, entering by ramp": ("sgt", "ramp", State({2: Loop(2, (0, 1), "attention", 0, 3)}, 2)),
    "block_loop": ("block_loop", "none", State({1: Loop(2, None, "block", 0, 0)})),
    "attention_loop": (
        "attention_loop",
        "none",
        State({1: Loop(1, (0, 1, 2, 3), "attention", 0, 0), 2: SETTLED}),
    ),
    "high_entropy_loop": (
        "high_entropy_loop",
        "decay",
        State({2: Loop(1, (1, 3), "attention", 0, STEP - 3, leaving=(0,))}),
    ),
    "low_entropy_loop": ("low_entropy_loop", "none", State({1: Loop(1, (0,), "attention", 0, 0)})),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Share of the largest logit: some thirty roundings in a row, each half a unit in the last place.
# The export of "vanilla" is transformers' own class: it comes as near to this as the others.
TOLERANCE = {"fp32": 30 * 2**-24, "bf16": 30 * 2**-9, "fp16": 30 * 2**-12}


def trained_looking(model: Transformer) -> Transformer:
    """With norms' weights apart from each other by factors, as training leaves them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.copy_((0.5 * torch.randn(weight.shape, generator=generator)).exp())
    return model


def differences(case: str, dtype: str, folder: Path) -> dict[str, float]:
    """Largest differences from the float64 reference, as shares of its largest logit."""
    method, entry, state = CASES[case]
    model = trained_looking(Transformer(SHAPE, seed=2))
    run = folder / "run"
    write_checkpoint(run, model, method=method, state=state, entry=entry, step=STEP)
    convert(run, folder / "out", dtype=dtype)
    exported = AutoModelForCausalLM.from_pretrained(
        folder / "out", trust_remote_code=True, dtype=DTYPES[dtype]
    ).eval()
    passes = passes_at(state, STEP, entry=entry, interval=INTERVAL, num_heads=SHAPE.num_heads)
    loops = loop_inputs(passes, torch.device("cpu"))
    ids = torch.randint(0, SHAPE.vocab_size, (4, 48), generator=torch.Generator().manual_seed(5))

    def logits(model: Transformer) -> Tensor:
        found = model(ids, loops=loops).logits
        assert found is not None
        return found.double()

    with torch.no_grad():
        trained = logits(model.to(DTYPES[dtype]))
        reference = logits(model.double())  # of the weights that the dtype left
        answers = {"training": trained, "export": exported(ids).logits.double()}
    scale = reference.abs().max()
    assert scale > 1
    return {
        name: float((answer - reference).abs().max() / scale) for name, answer in answers.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_method_whose_export_or_training_model_rounds_otherwise(
    case: str, dtype: str, tmp_path: Path
) -> None:
    for name, difference in differences(case, dtype, tmp_path).items():
        assert difference < TOLERANCE[dtype], name


if __name__ == "__main__":
    print("| method | " + " | ".join(f"{dtype}: training, export" for dtype in DTYPES) + " |")
    print("|---|" + "---|" * len(DTYPES))
    for case in CASES:
        cells = []
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as place:
                found = differences(case, dtype, Path(place))
            cells.append(f"{found['training']:.1e}, {found['export']:.1e}")
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
