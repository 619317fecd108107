"""Prefill and decode speed of exports: vanilla against loops, on the same weights, in one run.

Cases take turns, round by round, so that a busy machine slows all of them. Weights are random: what
is timed does not depend on them. Knows no checkpoint and no tokenizer.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgt_ds.config import ModelConfig, parse_variant
from sgt_ds.errors import UserError
from sgt_ds.model import llama_shape
from sgt_ds.progress import Progress

# Token ids and their positions, int64 (batch, length) and (1, length), to the next ids (batch, 1).
_Step = Callable[[Tensor, Tensor], Tensor]

# For a token of one sequence on a GPU, whose products all have a single row.
_ONE_ROW: dict[str, Any] = {
    # The library's product of one row takes 6 to 9 µs whatever its size; as a reduction it is tuned
    # where it runs, and joins what reads the same.
    "coordinate_descent_tuning": True,
    # Such a reduction would compute what it reads, an activation or a softmax, once for each row of
    # the weights: what takes more operations than these is a kernel of its own.
    "realize_opcount_threshold": 5,
    # A kernel starts while the one before it ends.
    "triton.enable_pdl": True,
}

# Tokens that a case decodes before the next one's turn: what else the machine does hits all alike.
_TURN = 8


@dataclass(frozen=True)
class InferenceSetting:
    """What is timed, and where."""

    model: ModelConfig
    variants: tuple[str, ...]
    """METHOD:K with K passes after the main one; `vanilla`, to which all are compared, always runs."""
    layers: int = 3
    """Looping layers: the deepest."""
    heads: int = 2
    """Heads that loop, of SGT."""
    batches: tuple[int, ...] = (1, 2, 4)
    """Sequences at once."""
    prompt: int = 128
    """Tokens of a prompt."""
    generated: int = 128
    """Tokens decoded after it."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compiled: bool = False
    """A compiled step over a static cache (CUDA graphs on a GPU), or plain calls, a growing one."""
    backend: str = "inductor"
    """torch's name of the compiler."""
    rounds: int = 5
    """Times that every case has its turn."""

    def loops(self) -> dict[str, dict[str, Any]]:
        """`loops` of an export, by variant. Raises: UserError where a variant is unknown."""
        chosen = range(self.model.num_layers - self.layers, self.model.num_layers)
        found: dict[str, dict[str, Any]] = {}
        for name in ("vanilla", *self.variants):
            method, depth = parse_variant(name)
            loop = {
                "depth": depth,
                "heads": list(range(self.heads)) if method == "sgt" else None,
                "scope": "block" if method == "block_loop" else "attention",
            }
            found[name] = {str(layer): loop for layer in chosen} if depth else {}
        return found


@dataclass(frozen=True)
class InferenceRow:
    """One case at one batch size. Medians over rounds; ratios are within a round, to vanilla."""

    case: str
    batch: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    """Of all sequences together."""
    prefill_ratio: float
    decode_ratio: float
    decode_ratio_quartiles: tuple[float, float]
    build_seconds: float = 0.0
    """Before the first round: of compiling and capturing, on a GPU."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def bench_inference(setting: InferenceSetting) -> Iterator[InferenceRow]:
    """Time all cases. Gives the rows of a batch size as soon as they are known.

    Raises: UserError where the shape has too few layers or heads, or a variant is unknown.
    """
    if setting.layers > setting.model.num_layers:
        raise UserError("--layers", None, f"the model has {setting.model.num_layers}; give fewer")
    if setting.heads > setting.model.num_heads:
        raise UserError("--heads", None, f"the model has {setting.model.num_heads}; give fewer")
    models = build_models(setting)
    total = len(setting.batches) * (len(models) + setting.rounds + 1)
    with Progress("bench inference", total, "turns") as progress:
        for batch in setting.batches:
            torch._dynamo.reset()
            runners, built = {}, {}
            for name, model in models.items():
                started = time.perf_counter()
                runners[name] = Runner(model, batch, setting)
                built[name] = time.perf_counter() - started
                progress.advance(1, f"{name}, batch {batch}")
            timed: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
            for number in range(setting.rounds + 1):
                for name, seconds in _round(runners, setting.generated).items():
                    if number:  # the first round warms up, and compiles where nothing is captured
                        timed[name].append(seconds)
                progress.advance(1, f"batch {batch}")
            for name in models:
                row = _row(name, batch, timed[name], timed["vanilla"], setting)
                yield replace(row, build_seconds=built[name])


def _round(runners: dict[str, Runner], generated: int) -> dict[str, tuple[float, float]]:
    """Seconds of each case's prefill and decoding, in turns of a few tokens."""
    prefill = {name: runner.prefill() for name, runner in runners.items()}
    decode = dict.fromkeys(runners, 0.0)
    for start in range(0, generated, _TURN):
        for name, runner in runners.items():
            decode[name] += runner.decode(min(_TURN, generated - start))
    return {name: (prefill[name], decode[name]) for name in runners}


def _row(
    name: str,
    batch: int,
    own: list[tuple[float, float]],
    vanilla: list[tuple[float, float]],
    setting: InferenceSetting,
) -> InferenceRow:
    prefill, decode = zip(*own, strict=True)
    ratios = [
        (base[0] / each[0], base[1] / each[1]) for each, base in zip(own, vanilla, strict=True)
    ]
    of_prefill, of_decode = (sorted(each) for each in zip(*ratios, strict=True))
    quarter = len(of_decode) // 4
    return InferenceRow(
        case=name,
        batch=batch,
        prefill_tokens_per_second=batch * setting.prompt / statistics.median(prefill),
        decode_tokens_per_second=batch * setting.generated / statistics.median(decode),
        prefill_ratio=statistics.median(of_prefill),
        decode_ratio=statistics.median(of_decode),
        decode_ratio_quartiles=(of_decode[quarter], of_decode[-1 - quarter]),
    )


def build_models(setting: InferenceSetting) -> dict[str, Any]:
    """A model for each case, all with the same weights in memory once."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from sgt_ds.inference.hf.modeling_sgt import SgtConfig, SgtForCausalLM

    shape = setting.model
    models: dict[str, Any] = {}
    weights: dict[str, Tensor] = {}
    for name, loops in setting.loops().items():
        config = SgtConfig(
            **llama_shape(shape),
            max_position_embeddings=setting.prompt + setting.generated + 1,
            attn_implementation="sdpa",
            loops=loops,
        )
        with torch.device("meta"):
            model = (SgtForCausalLM if loops else LlamaForCausalLM)(config)
        if not weights:
            generator = torch.Generator(setting.device).manual_seed(0)
            for key, blank in model.state_dict().items():
                tensor = torch.ones(blank.shape, dtype=setting.dtype, device=setting.device)
                if tensor.dim() > 1:
                    tensor.normal_(0, shape.init_std, generator=generator)
                weights[key] = tensor
        model.load_state_dict(weights, assign=True)
        model.model.rotary_emb = LlamaRotaryEmbedding(config).to(setting.device)
        models[name] = model.eval()
    return models


class Runner:
    """One case at one batch size: a prompt in, tokens out, timed."""

    def __init__(self, model: Any, batch: int, setting: InferenceSetting) -> None:
        self._model, self._setting = model, setting
        # transformers 5.24 renamed it.
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        generator = torch.Generator().manual_seed(1)
        shape = (batch, setting.prompt)
        ids = torch.randint(0, setting.model.vocab_size, shape, generator=generator)
        self.ids = ids.to(setting.device)
        """The prompts, int64 (batch, prompt)."""
        self.token = self.ids[:, -1:].clone()
        """The newest tokens, int64 (batch, 1); always in the same place."""
        self._positions = torch.arange(setting.prompt, device=setting.device)[None]
        self._position = self._positions[:, -1:].clone()  # of `token`
        self._cache = self._new_cache(batch)
        self._read_prompt = self._work(self.ids, self._positions)
        self._read_token = self._work(self.token, self._position)

    def prefill(self) -> float:
        """Seconds of the prompt, into an empty cache."""
        self._empty_cache()
        return self._timed(self._read_prompt, 1)

    def decode(self, tokens: int) -> float:
        """Seconds of so many tokens more."""
        return self._timed(self._read_token, tokens)

    def _timed(self, read: Callable[[], None], times: int) -> float:
        with torch.inference_mode():
            started = self._now()
            for _ in range(times):
                read()
            return self._now() - started

    def _work(self, ids: Tensor, positions: Tensor) -> Callable[[], None]:
        """What is timed: plain calls, compiled ones, or on a GPU one CUDA graph of compiled ones."""
        on_gpu = self._setting.device.type == "cuda"
        one_row = on_gpu and ids.numel() == 1
        if not self._setting.compiled:
            return partial(self._read, self._step, ids, positions)
        step = self._compiled(_ONE_ROW if one_row else None)
        read = partial(self._read, step, ids, positions)
        if not on_gpu:
            return read
        # The library's kernel for attention of one query waits for what comes before it; the
        # reductions that the compiler makes of plain operations overlap with it.
        with self._attention("eager" if one_row else "sdpa"):
            return self._captured(read)

    @contextmanager
    def _attention(self, implementation: str) -> Iterator[None]:
        usual = self._model.config._attn_implementation
        self._model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            self._model.set_attn_implementation(usual)

    def _read(self, step: _Step, ids: Tensor, positions: Tensor) -> None:
        """Leaves the next tokens and their position where the next call finds them."""
        self.token.copy_(step(ids, positions))
        torch.add(positions[:, -1:], 1, out=self._position)

    def _compiled(self, options: dict[str, Any] | None) -> _Step:
        setting, dynamo = self._setting, torch._dynamo.config
        # A prompt and a token of every case; dynamo's own 8 would end in an error.
        dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * len(setting.loops()))
        return torch.compile(
            self._step, fullgraph=True, dynamic=False, backend=setting.backend, options=options
        )

    def _captured(self, read: Callable[[], None]) -> Callable[[], None]:
        """`read` as one CUDA graph, which the host starts with a single call."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(2):  # compiles, tunes, and settles
                    self._empty_cache()
                    read()
            here.wait_stream(aside)
            with torch.cuda.graph(graph):
                read()
        replay: Callable[[], None] = graph.replay
        return replay

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        cache = {self._cache_name: self._cache}
        answer = self._model(ids, position_ids=positions, logits_to_keep=1, **cache)
        following: Tensor = answer.logits[:, -1:].argmax(-1)
        return following

    def _empty_cache(self) -> None:
        if self._setting.compiled:
            self._cache.reset()
        else:
            self._cache = self._new_cache(self.ids.shape[0])

    def _new_cache(self, batch: int) -> Any:
        from transformers import DynamicCache, StaticCache

        setting, config = self._setting, self._model.config
        if not setting.compiled:
            return DynamicCache(config=config)
        cache = StaticCache(config=config, max_cache_len=setting.prompt + setting.generated + 1)
        cache.early_initialization(
            batch, config.pass_heads(), config.head_dim, setting.dtype, setting.device
        )
        return cache

    def _now(self) -> float:
        if self._setting.device.type == "cuda":
            torch.cuda.synchronize(self._setting.device)
        return time.perf_counter()
