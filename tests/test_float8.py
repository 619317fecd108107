"""Products in float8: how far they lie from exact ones, which go through it, and who is refused."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from sgt_ds import train
from sgt_ds.cli import main
from sgt_ds.config import ModelConfig, config_differences, load_run_config
from sgt_ds.growth import Passes, is_narrow
from sgt_ds.model import Transformer, float8_fault, loop_inputs
from sgt_ds.model.linear import linear
from sgt_ds.report import html_report, read_history
from sgt_ds.training.evaluation import _as_exported

CPU = torch.device("cpu")
BF16_CPU = runs.ROOT / "ds_configs" / "zero2_bf16_cpu.json"
CONFIG = ModelConfig(
    hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, vocab_size=120
)
# Torch's own products in float8 take a CPU many times as long as others.
SMALL = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2, vocab_size=120)
TOKENS = torch.randint(120, (2, 33), generator=torch.Generator().manual_seed(0))
LOOPS: dict[str, dict[int, Passes]] = {
    "vanilla": {},
    "three heads": {1: Passes(2, "attention", (0, 2, 3), ((1.0, 0.5, 1.0), (1.0, 0.0, 0.5)))},
    "one head": {2: Passes(1, "attention", (1,), None)},
    "one head, deep": {2: Passes(3, "attention", (1,), None)},
    "block": {1: Passes(1, "block", None, None)},
}
# Largest relative rounding, 2^-(mantissa + 1), and what is lost at most below the least normal number,
# as a share of the largest magnitude.
E4M3, E5M2 = (2.0**-4, 2.0**-10 / 448), (2.0**-3, 2.0**-17 / 57344)


def bound(one: Tensor, of_one: tuple[float, float], other: Tensor, of_other: Any) -> Tensor:
    """How far the product of two rounded matrices may lie from the exact one, entry by entry."""
    sizes = one.abs(), other.abs()
    greater = [
        size * (1 + relative) + least * size.max()
        for size, (relative, least) in zip(sizes, (of_one, of_other), strict=True)
    ]
    # Returned in bf16: 2^-8 more, of what is itself rounded.
    return (greater[0] @ greater[1]) * (1 + 2.0**-8) - sizes[0] @ sizes[1]


def product(
    x: Tensor, weight: Tensor, gradient: Tensor, run: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The product and the gradients of `x` and `weight`, where `gradient` comes back."""
    one, other = (part.clone().requires_grad_() for part in (x, weight))
    out = run(one, other, True)
    out.backward(gradient)
    assert one.grad is not None
    assert other.grad is not None
    return out.detach(), one.grad, other.grad


def test_a_float8_product_or_a_gradient_strays_further_than_its_formats_round() -> None:
    torch._dynamo.reset()
    counters.clear()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    # A few outliers, and gradients as small as those of a mean over many tokens.
    x, weight, gradient = normal(4, 16, 48), 0.02 * normal(32, 48), 1e-7 * normal(4, 16, 32)
    x[0, 0, :2] *= 30
    rows, matrix, coming = (t.double() for t in (x.flatten(0, 1), weight, gradient.flatten(0, 1)))
    exact = (
        (rows @ matrix.T, bound(rows, E4M3, matrix.T, E4M3)),
        (coming @ matrix, bound(coming, E5M2, matrix, E4M3)),
        (coming.T @ rows, bound(coming.T, E5M2, rows, E4M3)),
    )
    # Transposed, the gradient lies as attention's does: not row by row.
    other = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    for run in (linear, torch.compile(linear, dynamic=False)):
        for comes in (gradient, other):
            for got, (expected, most) in zip(product(x, weight, comes, run), exact, strict=True):
                found = got.double().reshape(expected.shape)
                assert ((found - expected).abs() <= most).all()
                assert torch.cosine_similarity(found.flatten(), expected.flatten(), 0) >= 0.99
                # Nearer than this it would be no float8.
                assert (found - expected).norm() / expected.norm() >= 2.0**-7
    assert not counters["graph_break"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_product_is_another_or_asks_for_whole_rows(
    context: Callable[[], Any],
) -> None:
    x, weight = torch.randn(7, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    with_gradients = linear(x.clone().requires_grad_(), weight, True).detach()
    with context():
        assert torch.equal(linear(x, weight, True), with_gradients)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_becomes_a_number_and_the_update_is_not_skipped(value: float) -> None:
    x, weight = torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    gradient = torch.ones(16, 16).bfloat16()
    gradient[3, 5] = value
    _, of_x, of_weight = product(x, weight, gradient, linear)
    assert not of_x.isfinite().all()
    assert not of_weight.isfinite().all()
    nothing = torch.zeros_like(x)
    for part in product(nothing, nothing, nothing, linear):
        assert torch.equal(part, nothing)


def test_small_gradients_beside_a_large_one_vanish() -> None:
    """Against its largest, e4m3 knows nothing below 2^-18; e5m2 reaches down to 2^-32."""
    x, weight = torch.ones(16, 16).bfloat16(), torch.eye(16).bfloat16()
    gradient = torch.full((16, 16), 2.0**-20).bfloat16()
    gradient[0, 0] = 1
    _, of_x, _ = product(x, weight, gradient, linear)
    assert ((of_x / gradient).double() - 1).abs().max() <= E5M2[0] + 2.0**-8


class _Products(TorchDispatchMode):
    """Counts matrix products by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # of torch's own form
        self.kinds[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_product_of_a_block_or_of_a_loop_is_not_in_float8(name: str, checkpointing: bool) -> None:
    model = Transformer(CONFIG, seed=3, fp8=True, activation_checkpointing=checkpointing).bfloat16()
    passes = LOOPS[name]
    with _Products() as counted:
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:], loops=loop_inputs(passes, CPU)).loss
        loss.backward()
    # Attention has two products with weights, the feed-forward network three. Passes in the heads' own
    # space are small, build on each other, and stay in bf16.
    forward, narrow = 5 * CONFIG.num_layers, 0
    for own in passes.values():
        heads, scaled = own.head_count(CONFIG.num_heads), own.scale is not None
        if own.scope == "attention" and is_narrow(
            own.depth, heads, CONFIG.num_heads, scaled=scaled
        ):
            narrow += 2 * own.depth + 2
        else:
            forward += own.depth * (5 if own.scope == "block" else 2)
    times = 4 if checkpointing else 3
    assert counted.kinds["_scaled_mm"] == forward * times
    assert counted.kinds["mm"] == 3 + narrow * times, "the output matrix's are in bf16 too"
    assert not counted.kinds.keys() & {"addmm", "linear"}


@pytest.mark.parametrize("name", LOOPS)
def test_a_model_in_float8_is_further_from_an_exact_one_than_its_products(name: str) -> None:
    loops = loop_inputs(LOOPS[name], CPU)

    def passed(dtype: torch.dtype, **options: bool) -> tuple[Tensor, Tensor]:
        model = Transformer(CONFIG, seed=3, **options)
        with torch.no_grad():  # matrices at which blocks weigh as much as what they add to
            for weight in model.parameters():
                weight.mul_(5.0 if weight.dim() > 1 else 1.0)
        model = model.to(dtype)
        model(TOKENS[:, :-1], TOKENS[:, 1:], loops=loops).loss.backward()
        gradients = [weight.grad.double().flatten() for weight in model.parameters()]
        return model(TOKENS[:, :-1], loops=loops).logits.detach().double(), torch.cat(gradients)

    exact, half = passed(torch.float64), passed(torch.bfloat16)
    float8 = passed(torch.bfloat16, fp8=True)
    again = passed(torch.bfloat16, fp8=True, activation_checkpointing=True)
    assert all(torch.equal(one, other) for one, other in zip(float8, again, strict=True))

    def distance(found: Tensor) -> float:
        return float((found - exact[0]).norm() / exact[0].norm())

    # Two operands that are off by up to 2^-4, evenly spread at each power of two: 3.7% of a product;
    # fifteen and more of them one after another, each as large as what there was before.
    products = 5 * CONFIG.num_layers + 5
    assert 3 * distance(half[0]) <= distance(float8[0]) <= 0.037 * products**0.5
    assert torch.cosine_similarity(float8[1], exact[1], 0) >= 0.95


def test_compiled_blocks_break_at_a_float8_product_or_stray_further() -> None:
    torch._dynamo.reset()
    counters.clear()
    looping = Passes(1, "attention", (1,), None)
    loops = loop_inputs(dict.fromkeys(range(SMALL.num_layers), looping), CPU)
    found = []
    for options in ({}, {"fp8": True}, {"fp8": True, "compile_blocks": True}):
        model = Transformer(SMALL, seed=3, activation_checkpointing=True, **options).bfloat16()
        model(TOKENS[:, :-1], TOKENS[:, 1:], loops=loops).loss.backward()
        gradients = [weight.grad.double().flatten() for weight in model.parameters()]
        found.append(torch.cat(gradients))
    half, eager, compiled = found
    # What enters a product has not been rounded to bf16 before where blocks are compiled: one value in
    # twenty falls on the other side of a border of float8, and only the distances agree.
    assert (compiled - half).norm() <= 1.25 * (eager - half).norm()
    assert not counters["graph_break"]


def test_scores_depend_on_float8_or_training_loses_it_after_them() -> None:
    trained = Transformer(CONFIG, seed=3, fp8=True).bfloat16()
    exported = Transformer(CONFIG, seed=3).bfloat16()
    with _as_exported(trained):
        assert torch.equal(trained(TOKENS).logits, exported(TOKENS).logits)
    assert trained.fp8
    assert not torch.equal(trained(TOKENS[:, 1:]).logits, exported(TOKENS[:, 1:]).logits)


def test_a_model_learns_less_in_float8() -> None:
    losses = {fp8: _losses(fp8) for fp8 in (False, True)}
    assert losses[False][-10:].mean() < losses[False][0] - 1.5, "nothing was learnt"
    # 275M on a GPU, 200 updates: 0.026 at most, 0.009 in the mean of the last 20.
    gap = losses[True] - losses[False]
    assert gap.abs().max() <= 0.1
    assert abs(gap[-10:].mean()) <= 0.03


def _losses(fp8: bool) -> Tensor:
    """Losses of 40 updates with fp32 master weights, one layer looping from the 21st on."""
    model = Transformer(SMALL, seed=2, fp8=fp8).bfloat16()
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    # Each token is followed by one of two: much to learn in few updates.
    follows = torch.randint(120, (120, 2), generator=generator)
    losses = []
    for update in range(40):
        rows = [torch.randint(120, (4,), generator=generator)]
        for _ in range(32):
            rows.append(follows[rows[-1], torch.randint(2, (4,), generator=generator)])
        tokens = torch.stack(rows, dim=1)
        loops = loop_inputs(LOOPS["one head"] if update >= 20 else {}, CPU)
        loss = model(tokens[:, :-1], tokens[:, 1:], loops=loops).loss
        loss.backward()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            for weight, master in zip(model.parameters(), masters, strict=True):
                weight.copy_(master)
        losses.append(loss.detach().double())
    return torch.stack(losses)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_data(tmp_path_factory.mktemp("data"))


def write_run(path: Path, data: Path, /, **sections: Mapping[str, Any]) -> Path:
    """A run of eight updates in float8, whose layers begin to loop after the fourth."""
    run = {
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 2},
        "growth": {"layers": 2, "heads": 1},
        "data": {"sequence_length": 32},
        "training": {"fp8": True, "steps": 8, "global_batch_size": 4, "validation_sequences": 4},
        "optimizer": {"warmup_steps": 2},
    }
    for name, keys in sections.items():
        run[name] = {**run.get(name, {}), **keys}
    return runs.write_run(path, data, deepspeed=str(BF16_CPU), **run)


# What the launcher starts, with the products counted, or on a device that another rank's might be.
COUNTING = """
import sys, torch
from sgt_ds import train
multiply, count = torch._scaled_mm, [0]
def counted(*arguments, **named):
    count[0] += 1
    return multiply(*arguments, **named)
torch._scaled_mm = counted
status = train.main(sys.argv[1:])
print("float8 products:", count[0])
sys.exit(status)
"""
REFUSED = """
import sys
from sgt_ds import train
from sgt_ds.training import build
build.float8_fault = lambda device: "an A100, which has none"
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_run_trains_in_bf16_where_float8_is_asked_for(tmp_path: Path, data: Path) -> None:
    run = write_run(tmp_path / "run.yaml", data)
    told = runs.run_to_end([sys.executable, "-c", COUNTING, str(run)])
    # Eight updates of two micro-batches, forward and backward through three layers; more in loops.
    least = 8 * 2 * 3 * 5 * 3
    assert int(told.rpartition("float8 products: ")[2].split()[0]) > least
    losses = runs.losses(tmp_path / "run")
    assert sorted(losses) == list(range(1, 9))
    assert losses[8] < losses[1] - 0.1
    assert runs.check_replay(tmp_path / "run")[0] == "activate"
    header = read_history(tmp_path / "run").header
    assert header is not None
    assert header.values["fp8"], "which growth diff names"
    saved = load_run_config(tmp_path / "run" / "run.yaml")
    assert saved.training.fp8
    # As with compiling, the same run goes on without it.
    assert config_differences(saved, load_run_config(run, ["training.fp8=false"])) == []
    told = runs.run_to_end(runs.single(run, "training.fp8=false"))
    assert "training.fp8: false from step 8 on, unlike before" in told
    assert [start.values["fp8"] for start in read_history(tmp_path / "run").starts] == [True, False]
    page = html_report([read_history(tmp_path / "run")])
    assert re.findall("<td>(yes|no)</td>", page) == ["yes", "no"]


def test_a_change_of_float8_passes_in_silence_where_a_run_goes_on_elsewhere(
    tmp_path: Path, data: Path
) -> None:
    run = write_run(tmp_path / "run.yaml", data, checkpoint={"every": 4})
    runs.run_to_end(runs.single(run))
    middle = tmp_path / "run" / "checkpoints" / "step-00000004"
    for fp8, change in (
        ("true", []),
        ("false", ["training.fp8: false from step 4 on, unlike before"]),
    ):
        words = (f"resume={middle}", f"run_dir={tmp_path / fp8}", f"training.fp8={fp8}")
        told = runs.run_to_end(runs.single(run, *words))
        assert [line for line in told.splitlines() if "unlike before" in line] == change


def test_a_gpu_without_float8_fails_in_the_middle_of_a_run(tmp_path: Path, data: Path) -> None:
    run = write_run(tmp_path / "run.yaml", data)
    told = runs.run_to_end([sys.executable, "-c", REFUSED, str(run)], expect=2)
    message = "rank 0 is on an A100, which has none; use other GPUs, or set it to false"
    assert f"sgt-ds train: {run}: training.fp8: {message}" in told.splitlines()
    assert "Traceback" not in told
    assert not (tmp_path / "run" / "run.yaml").exists()


@pytest.mark.parametrize(
    ("capability", "fault"),
    [
        ((8, 0), "A100, which has compute capability 8.0; float8 needs 8.9"),
        ((8, 9), None),
        ((9, 0), None),
        ((10, 0), None),
    ],
)
def test_a_gpu_is_judged_by_another_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fault: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert float8_fault(torch.device("cuda")) == fault
    assert float8_fault(CPU) is None


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"model": {"hidden_size": 96, "num_heads": 4}},
            "{run}: model.hidden_size: 96 must be a multiple of 16 × num_heads (64) in float8; "
            "set 64 "
            "or 128, or training.fp8=false",
        ),
        (
            {"model": {"intermediate_size": 8}},
            "{run}: model.intermediate_size: 8 must be a multiple of 16 in float8; set 16, or "
            "training.fp8=false",
        ),
        (
            {"data": {"sequence_length": 60}},
            "{run}: data.sequence_length: 60 must be a multiple of 16 in float8; set 48 or 64, or "
            "training.fp8=false",
        ),
    ],
)
def test_shapes_that_tensor_cores_refuse_are_found_out_by_the_ranks(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, dict[str, int]],
    line: str,
) -> None:
    run = write_run(tmp_path / "run.yaml", data, **sections)
    expected = line.format(run=run)
    for entry, verb, name in ((main, ["train"], "sgt-ds"), (train.main, [], "sgt-ds train")):
        assert entry([*verb, str(run)]) == 2
        assert capsys.readouterr().err.splitlines() == [f"{name}: {expected}"]
    assert train.main([str(run), "training.fp8=false", "training.steps=0"]) == 2
    assert "training.steps" in capsys.readouterr().err, "allowed without float8"


def test_float8_beside_fp32_weights_is_found_out_by_the_ranks(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run.yaml", data)
    assert train.main([str(run), f"deepspeed={runs.CPU_FP32}"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    message = "must be true for training.fp8; set it, or use ds_configs/zero2_bf16.json"
    assert told.startswith(f"sgt-ds train: {runs.CPU_FP32}: bf16.enabled: {message}")


def test_a_plan_keeps_silent_on_what_float8_changes(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run.yaml", data)
    told = []
    for override in ("training.fp8=true", "training.fp8=false"):
        assert main(["plan", str(run), override]) == 0
        told.append(capsys.readouterr().out.splitlines())
    with_it, without = told
    assert [line for line in with_it if line not in without] == [
        "  counted as in bf16: from a few thousand tokens per micro-batch on, float8 needs less"
    ]
    assert [line for line in without if line not in with_it] == []


def test_a_bench_of_float8_measures_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["bench", "step", "--preset", "tiny", "--device", "cpu", "--mode", "eager", "--fp8"]
    small += ["--variants", "vanilla", "--micro-batch-size", "1", "--rounds", "1", "--json"]
    with _Products() as counted:
        assert main([*small, "--dtype", "bf16", "--seq-len", "16"]) == 0
    assert '"fp8": true' in capsys.readouterr().out
    assert counted.kinds["_scaled_mm"] >= 90
    for flags, told in (
        (["--seq-len", "32"], "--fp8: needs --dtype bf16; give both"),
        (["--dtype", "bf16", "--seq-len", "30"], "--seq-len: 30 must be a multiple of 16"),
    ):
        assert main([*small, *flags]) == 2
        assert told in capsys.readouterr().err
