"""`transformers`' own model tests, and the generation contract, on the SGT class.

Not collected by itself: `test_mixin.py` runs it with TRANSFORMERS_TESTS, the `tests` folder of the
source distribution.
"""

from __future__ import annotations

import os
import sys
import types
import unittest
from typing import Any

import torch
from generation_contract import ExportTesterMixin, GenerationTesterMixin
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from sgt_ds.inference.hf.modeling_sgt import SgtConfig, SgtForCausalLM, SgtModel


def module(name: str, **values: Any) -> types.ModuleType:
    """A module of that name, as if it had been imported."""
    made = types.ModuleType(name)
    made.__dict__.update(values)
    sys.modules[name] = made
    return made


module("transformers_tests").__path__ = [os.environ["TRANSFORMERS_TESTS"]]
module("transformers_tests.exporters")
module("transformers_tests.exporters.test_export", ExportTesterMixin=ExportTesterMixin)
module("transformers_tests.generation")
module("transformers_tests.generation.test_utils", GenerationTesterMixin=GenerationTesterMixin)

from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor  # noqa: E402

# The tests ask these tables what a class is for.
AutoConfig.register("sgt", SgtConfig)
AutoModel.register(SgtConfig, SgtModel)
AutoModelForCausalLM.register(SgtConfig, SgtForCausalLM)
modeling_auto.MODEL_MAPPING_NAMES["sgt"] = "SgtModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["sgt"] = "SgtForCausalLM"

LOOPS = {
    "0": {"depth": 1, "heads": None, "scope": "block"},
    "1": {
        "depth": 2,
        "heads": [1, 3],
        "scope": "attention",
        "scale": {"1": [1.0, 0.5], "3": [1.0, 0.5]},
    },
}


class Shapes:
    """What the mixin asks of a tester of shapes."""

    base_model_class = SgtModel
    is_training = True
    batch_size, seq_length = 4, 7
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 4
    vocab_size = 99

    def get_config(self) -> SgtConfig:
        return SgtConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=32,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            loops=LOOPS,
        )

    def prepare_config_and_inputs(self) -> tuple[Any, ...]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), ids, torch.tril(torch.ones_like(ids))

    def prepare_config_and_inputs_for_common(self) -> tuple[SgtConfig, dict[str, Any]]:
        config, ids, mask = self.prepare_config_and_inputs()
        return config, {"input_ids": ids, "attention_mask": mask}


class SgtModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (SgtModel, SgtForCausalLM)

    def setUp(self) -> None:
        self.model_tester = Shapes()
