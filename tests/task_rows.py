"""Made rows in the tasks' own forms, a tokenizer that spells them, and tiny models, for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sgt_ds.inference.hf.modeling_sgt import SgtConfig, SgtForCausalLM

_SPEECH = """
    river stone garden lamp winter copper music window bread horse cloud paper engine salt
    green silent heavy bright young narrow walks carries opens finds under beyond naïve café
"""
WORDS = _SPEECH.split()
SUBJECTS = ("anatomy", "astronomy", "world_religions", "econometrics", "marketing")
POSITIONS = 96


class _Author:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def words(self, low: int, high: int) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(low, high)))

    def sentence(self) -> str:
        return self.words(4, 9).capitalize() + "."

    def several(self, count: int) -> list[str]:
        return [self.words(1, 4) for _ in range(count)]

    def below(self, count: int) -> int:
        return self._random.randrange(count)


def made_rows(items: int = 12, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Rows by folder of a task."""
    author = _Author(seed)

    def lettered(count: int, question: str = "question") -> dict[str, Any]:
        return {
            "id": f"q{author.below(10**6)}",
            question: author.sentence(),
            "choices": {"text": author.several(count), "label": list("ABCDE"[:count])},
            "answerKey": "ABCDE"[author.below(count)],
        }

    def numbered() -> dict[str, Any]:  # some of ARC's rows have digits for letters
        row = lettered(4)
        row["choices"]["label"] = list("1234")
        return {**row, "answerKey": str(1 + author.below(4))}

    def arithmetic() -> dict[str, Any]:
        first, second = author.below(90), author.below(90)
        row = lettered(4)
        row["choices"]["text"] = [str(first + second + off) for off in (0, 1, 10, -1)]
        return {**row, "question": f"Calculate {first} + {second} =", "answerKey": "A"}

    return {
        "arc_easy": [numbered() if row % 4 == 3 else lettered(4) for row in range(items)],
        "openbookqa": [lettered(4, "question_stem") for _ in range(items)],
        "commonsense_qa": [lettered(5) for _ in range(items)],
        "basic_arithmetic": [arithmetic() for _ in range(items)],
        "winogrande": [
            {
                "sentence": f"{author.words(3, 6)} _ {author.sentence()}",
                "option1": author.words(1, 1),
                "option2": author.words(1, 1),
                "answer": str(1 + author.below(2)),
            }
            for _ in range(items)
        ],
        "social_iqa": [
            {
                "context": author.sentence(),
                "question": author.sentence(),
                **{f"answer{letter}": author.words(1, 4) for letter in "ABC"},
                "label": str(1 + author.below(3)),
            }
            for _ in range(items)
        ],
        "sciq": [
            {
                "question": author.sentence(),
                **{f"distractor{place}": author.words(1, 2) for place in (1, 2, 3)},
                "correct_answer": author.words(1, 2),
                # Some have none; one is longer than the model's positions.
                "support": author.words(200, 200) if row == 1 else author.words(0, 9) * (row % 2),
            }
            for row in range(items)
        ],
        "hellaswag": [
            {
                "ind": row,
                "activity_label": author.words(1, 2),
                "ctx_a": author.sentence() + " [header] How [title] so",
                "ctx_b": author.words(1, 2),
                "endings": [f"{text}  [step] {author.words(1, 3)}" for text in author.several(4)],
                "label": str(author.below(4)),
            }
            for row in range(items)
        ],
        "mmlu": [
            {
                "question": f" {author.sentence()}",
                "subject": SUBJECTS[row % len(SUBJECTS)],
                "choices": author.several(4),
                "answer": author.below(4),
            }
            for row in range(2 * items)
        ],
    }


def write_rows(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    """`TASK/validation.jsonl` files."""
    for task, several in rows.items():
        path = folder / task / "validation.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in several), encoding="utf-8")
    return folder


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE of some 400 ids; `<|endoftext|>` is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "Question: Answer: Calculate"] * 20, trainer)
    return tokenizer


def write_model(folder: Path, *, loops: bool, seed: int = 0) -> Path:
    """A tiny model of random weights that says different things of different choices."""
    tokenizer = byte_tokenizer()
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if loops:
        entry = {"depth": 2, "heads": [1, 3], "scope": "attention"}
        model: Any = SgtForCausalLM(SgtConfig(**shape, loops={"1": entry}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return folder
