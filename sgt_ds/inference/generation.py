"""Text from an export, through `transformers` and its cache. Knows no checkpoint and no training.

The model's code is this package's own copy of the file that exports carry: speaking never runs code
out of the folder it reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sgt_ds.errors import UserError, refusal
from sgt_ds.inference.device import usable_device
from sgt_ds.inference.folder import (
    cannot_be_loaded,
    check_exported_tokenizer,
    load_tokenizer,
    loading_dtype,
    quiet_transformers,
)
from sgt_ds.progress import counted

# Tokens of a completion where nobody says how many.
_MOST_TOKENS = 64


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen and when to stop."""

    max_new_tokens: int | None = None
    """Maximum number of tokens after the prompt; None: 64, or as many as the positions that the
    model was trained on leave behind it."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, logits are divided by it and a token is drawn."""
    top_p: float = 1.0
    """Draw among the likeliest tokens whose probabilities add up to this."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0 among all."""
    seed: int = 0
    """Seed of the draws."""
    stop: tuple[str, ...] = field(default=())
    """Texts that end a completion; they are cut off it."""

    def __post_init__(self) -> None:
        for flag, good, remedy in (
            (
                "--max-new-tokens",
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                "give 1 or more",
            ),
            (
                "--temperature",
                self.temperature == 0 or self.temperature >= 1e-3,
                "give 0, or 0.001 or more",
            ),
            ("--top-p", 0 < self.top_p <= 1, "give a share above 0, up to 1"),
            ("--top-k", self.top_k >= 0, "give 0 or more"),
            ("--stop", all(self.stop), "give a text that is not empty"),
        ):
            if not good:
                value = getattr(self, flag[2:].replace("-", "_"))
                raise UserError(flag, None, f"{value} is out of range; {remedy}")


@dataclass(frozen=True)
class Completion:
    """One prompt and what came of it. `finish`: stop (end token or stop text) or length."""

    prompt: str
    text: str
    prompt_tokens: int
    tokens: int
    finish: str
    seconds: float
    """Wall time of the batch that it was part of."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class TextGenerator:
    """A loaded export: tokenizer and model, ready to complete prompts.

    `directory`: what `sgt-ds convert` wrote. `device`: as torch names it; None takes a GPU where
    there is one. `dtype`: bf16, fp16, fp32, or None for that of the export (float32 on a CPU,
    where half precision is slow).
    Raises: UserError where the folder is not an export or holds no tokenizer.
    """

    def __init__(
        self, directory: Path, *, device: str | None = None, dtype: str | None = None
    ) -> None:
        self.directory = directory
        self.device = usable_device(device)
        kind = _model_class(directory)
        check_exported_tokenizer(directory)
        from transformers import PreTrainedTokenizerFast

        quiet_transformers()
        wanted = loading_dtype(self.device, dtype)
        try:
            loaded = kind.from_pretrained(directory, dtype=wanted, use_safetensors=True)
            self.model: Any = loaded.to(self.device).eval()
        except Exception as error:  # of transformers, its hub, torch and safetensors
            raise cannot_be_loaded(directory, error) from None
        # Not AutoTokenizer: it would ask on the terminal whether to run the folder's own code.
        self.tokenizer: Any = load_tokenizer(PreTrainedTokenizerFast, directory)

    def warnings(self, prompts: Sequence[str], sampling: Sampling) -> list[str]:
        """What will take the model beyond the positions that it was trained on, in one line."""
        trained = self._trained
        long = []
        for prompt in prompts:
            length = len(self._ids(prompt))
            if length + self._limit(length, sampling) > trained:
                long.append((length, prompt))
        if not long:
            return []
        length, prompt = max(long)
        start = prompt if len(prompt) <= 40 else f"{prompt[:39]}…"
        more = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
        which = f"prompt {start!r} of {counted(length, 'token')}{more}"
        if length >= trained:
            return [
                f"{which}: fills the {trained} positions that the model was trained on, and what "
                "follows is beyond them; give a shorter prompt"
            ]
        return [
            f"{which}: --max-new-tokens {sampling.max_new_tokens} exceeds the {trained} positions "
            f"that the model was trained on; give {trained - length} or less"
        ]

    def complete(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        batch_size: int = 8,
        on_text: Callable[[str], None] | None = None,
    ) -> Iterator[Completion]:
        """Complete `prompts`, in batches, in order.

        `on_text` hears of new text as it comes; then every prompt is a batch of its own.
        """
        torch.manual_seed(sampling.seed)
        size = 1 if on_text is not None else batch_size
        for start in range(0, len(prompts), size):
            yield from self._batch(list(prompts[start : start + size]), sampling, on_text)

    def _batch(
        self, prompts: list[str], sampling: Sampling, on_text: Callable[[str], None] | None
    ) -> list[Completion]:
        started = time.perf_counter()
        inputs = self._encode(prompts)
        limits = [
            self._limit(length, sampling) for length in inputs["attention_mask"].sum(1).tolist()
        ]
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            choice = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        if sampling.stop:
            choice |= {"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer}
        if on_text is not None:
            choice["streamer"] = _Streamer(self.tokenizer, sampling.stop, on_text)
        with torch.inference_mode():
            rows = self.model.generate(
                **inputs, max_new_tokens=max(limits), use_cache=True, **choice
            )
        seconds = time.perf_counter() - started
        width = inputs["input_ids"].shape[1]
        return [
            self._completion(
                prompt,
                row[:width][mask.bool()].tolist(),
                row[width:][:limit].tolist(),
                sampling,
                seconds,
            )
            for prompt, mask, row, limit in zip(
                prompts, inputs["attention_mask"], rows, limits, strict=True
            )
        ]

    @property
    def _trained(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def _limit(self, length: int, sampling: Sampling) -> int:
        """The most tokens behind a prompt of `length` tokens."""
        if sampling.max_new_tokens is not None:
            return sampling.max_new_tokens
        room = self._trained - length
        return min(_MOST_TOKENS, room) if room > 0 else _MOST_TOKENS

    def _encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        rows = [self._ids(prompt) for prompt in prompts]
        width = max(map(len, rows))
        fill = self.tokenizer.pad_token_id or 0
        padded = [[fill] * (width - len(row)) + row for row in rows]
        masks = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return {
            "input_ids": torch.tensor(padded, device=self.device),
            "attention_mask": torch.tensor(masks, device=self.device),
        }

    def _ids(self, prompt: str) -> list[int]:
        """Raises: UserError where there is none."""
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        first = self.tokenizer.bos_token_id
        if first is None:
            first = self.tokenizer.eos_token_id
        if first is None and not ids:
            raise UserError(
                "--prompt", None, "is empty, and the tokenizer has no BOS token; give some text"
            )
        # Nothing to continue from: begin a text as training did, behind the end of another.
        return ids or [first]

    def _completion(
        self,
        prompt: str,
        prompt_ids: list[int],
        ids: list[int],
        sampling: Sampling,
        seconds: float,
    ) -> Completion:
        finish = "length"
        end = self.tokenizer.eos_token_id
        if end is not None and end in ids:
            ids, finish = ids[: ids.index(end)], "stop"
        text = _continuation(self.tokenizer, prompt_ids, ids)
        cuts = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
        if cuts:
            text, finish = text[: min(cuts)], "stop"
            # What fills the row while longer ones of its batch go on.
            while ids and ids[-1] == self.tokenizer.pad_token_id:
                ids = ids[:-1]
        return Completion(prompt, text, len(prompt_ids), len(ids), finish, round(seconds, 4))


def _model_class(directory: Path) -> Any:
    """The class that loads the export in `directory`. Raises: UserError."""
    path = directory / "config.json"
    remedy = "give a folder written by `sgt-ds convert`"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        fault = "is not an export (no config.json)" if directory.exists() else "does not exist"
        raise UserError(directory, None, f"{fault}; `sgt-ds convert` writes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(path, None, refusal(error, "read", "convert again")) from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(path, "model_type", f"is missing, so this is not an export; {remedy}")
    model_type = values["model_type"]
    if model_type == "llama":
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM
    if model_type == "sgt":
        from sgt_ds.inference.hf.modeling_sgt import SgtForCausalLM

        return SgtForCausalLM
    raise UserError(path, "model_type", f"'{model_type}' is neither llama nor sgt; {remedy}")


def _continuation(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    """Text of `ids`, decoded behind the prompt's last token so that a leading space stays one."""
    head = prompt[-1:]
    before = len(tokenizer.decode(head, skip_special_tokens=True))
    return str(tokenizer.decode(head + ids, skip_special_tokens=True)[before:])


class _Streamer:
    """Hands text on as it grows; holds back what may be the head of a stop text or character."""

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...], on_text: Callable[[str], None]
    ) -> None:
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._prompt: list[int] | None = None
        self._ids: list[int] = []
        self._said = 0

    def put(self, value: torch.Tensor) -> None:
        """Take new ids; the first ones are the prompt."""
        ids = value.flatten().tolist()
        if self._prompt is None:
            self._prompt = ids
            return
        self._ids += ids
        self._say(final=False)

    def end(self) -> None:
        """Say what was held back."""
        self._say(final=True)

    def _say(self, *, final: bool) -> None:
        text = _continuation(self._tokenizer, self._prompt or [], self._ids)
        cuts = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if cuts:
            text = text[: min(cuts)]
        elif not final:
            while text.endswith("�"):
                text = text[:-1]
            longest = max(map(len, self._stop), default=0) - 1
            held = next(
                (
                    n
                    for n in range(longest, 0, -1)
                    if any(s.startswith(text[-n:]) for s in self._stop)
                ),
                0,
            )
            text = text[: len(text) - held]
        if len(text) > self._said:
            self._on_text(text[self._said :])
            self._said = len(text)
