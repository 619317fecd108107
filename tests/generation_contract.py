"""What `transformers` documents of `generate` and of `torch.export`, as checks of a model class.

Stands where `ModelTesterMixin` looks for the project's own two mixins, which its source
distribution leaves out. A tester has `model_tester` and `all_generative_model_classes`.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    StaticCache,
    set_seed,
)
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateDecoderOnlyOutput,
)

NEW = 5
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class ExportTesterMixin:
    """`torch.export` of a forward pass."""

    def test_torch_export(self: Any) -> None:
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class(config).eval()
            inputs["use_cache"] = False
            with torch.no_grad():
                program = torch.export.export(model, (), kwargs=inputs, strict=False)
                expected, exported = model(**inputs), program.module()(**inputs)
            torch.testing.assert_close(exported[0], expected[0], rtol=1e-4, atol=1e-5)


class GenerationTesterMixin:
    """`generate`, its caches, and what `forward` owes to it."""

    def _models(self: Any, attention: str = "sdpa") -> Iterator[tuple[Any, Any]]:
        """Models with their prompt, no token of which ends a text."""
        for model_class in self.all_generative_model_classes:
            set_seed(7)
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            config.eos_token_id = None
            config.initializer_range = 0.2  # far enough from 0 that texts are no accident
            config._attn_implementation = attention
            model = model_class(config).eval()
            ids = torch.randint(3, config.vocab_size, inputs["input_ids"].shape)
            yield model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _check_caches_are_equal(self: Any, one: Any, other: Any) -> None:
        assert len(one.layers) == len(other.layers)
        for left, right in zip(one.layers, other.layers, strict=True):
            torch.testing.assert_close(left.keys, right.keys)
            torch.testing.assert_close(left.values, right.values)

    def test_inherits_generation_mixin(self: Any) -> None:
        for model_class in self.all_generative_model_classes:
            assert GenerationMixin in model_class.__mro__

    def test_greedy_generate(self: Any) -> None:
        for model, inputs in self._models():
            plain = inputs["input_ids"]
            with torch.no_grad():
                for _ in range(NEW):
                    following = model(plain, use_cache=False).logits[:, -1:].argmax(-1)
                    plain = torch.cat((plain, following), 1)
            assert torch.equal(model.generate(**inputs, **GREEDY), plain)

    def test_greedy_generate_dict_outputs(self: Any) -> None:
        for model, inputs in self._models("eager"):
            more = {"output_attentions": True, "output_hidden_states": True}
            output = model.generate(**inputs, **GREEDY, **DICT, **more, use_cache=False)
            assert isinstance(output, GenerateDecoderOnlyOutput)
            assert len(output.scores) == len(output.logits) == len(output.attentions) == NEW
            assert len(output.attentions[0]) == model.config.num_hidden_layers
            assert len(output.hidden_states[0]) == model.config.num_hidden_layers + 1

    def test_greedy_generate_dict_outputs_use_cache(self: Any) -> None:
        for model, inputs in self._models():
            output = model.generate(**inputs, **GREEDY, **DICT, use_cache=True)
            length = output.sequences.shape[1] - 1  # the last token has been through no layer
            assert output.past_key_values.get_seq_length() == length

    def test_sample_generate(self: Any) -> None:
        for model, inputs in self._models():
            texts = []
            for seed in (1, 1, 2):
                set_seed(seed)
                texts.append(model.generate(**inputs, do_sample=True, max_new_tokens=8, top_k=50))
            assert torch.equal(texts[0], texts[1])
            assert not torch.equal(texts[0], texts[2])

    def test_sample_generate_dict_output(self: Any) -> None:
        for model, inputs in self._models():
            how = {"do_sample": True, "max_new_tokens": NEW}
            assert isinstance(model.generate(**inputs, **how, **DICT), GenerateDecoderOnlyOutput)

    def test_beam_search_generate(self: Any) -> None:
        """A search with as many beams as continuations finds the likeliest of all."""
        for model, inputs in self._models():
            rows, (first, size) = inputs["input_ids"].shape[0], (inputs["input_ids"], 99)
            output = model.generate(
                **inputs,
                **{**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2},
                **DICT,
                num_beams=size,
                length_penalty=0.0,
            )
            assert isinstance(output, GenerateBeamDecoderOnlyOutput)
            with torch.no_grad():
                one = model(first).logits[:, -1].log_softmax(-1)
                pairs = torch.cat(
                    (
                        first.repeat_interleave(size, 0),
                        torch.arange(size).repeat(rows)[:, None],
                    ),
                    1,
                )
                two = model(pairs).logits[:, -1].log_softmax(-1).view(rows, size, size)
            best = (one[..., None] + two).flatten(1).max(1).values
            torch.testing.assert_close(output.sequences_scores, best, rtol=1e-4, atol=1e-4)

    def test_beam_search_generate_dict_outputs_use_cache(self: Any) -> None:
        for model, inputs in self._models():
            with_cache = model.generate(**inputs, **GREEDY, num_beams=3, use_cache=True)
            without = model.generate(**inputs, **GREEDY, num_beams=3, use_cache=False)
            assert torch.equal(with_cache, without)

    def test_beam_sample_generate(self: Any) -> None:
        for model, inputs in self._models():
            output = model.generate(**inputs, do_sample=True, num_beams=2, max_new_tokens=NEW)
            assert output.shape == (len(output), inputs["input_ids"].shape[1] + NEW)

    def test_generate_without_input_ids(self: Any) -> None:
        for model, _ in self._models():
            assert model.generate(bos_token_id=3, **GREEDY).shape == (1, NEW + 1)

    def test_generate_from_inputs_embeds(self: Any) -> None:
        for model, inputs in self._models():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            for beams in (1, 2):
                how = {**GREEDY, "num_beams": beams}
                text = model.generate(**inputs, **how)
                mask = inputs["attention_mask"]
                new = model.generate(inputs_embeds=embeds, attention_mask=mask, **how)
                assert torch.equal(text[:, -NEW:], new)

    def test_generate_from_inputs_embeds_with_static_cache(self: Any) -> None:
        for model, inputs in self._models():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            common = {"attention_mask": inputs["attention_mask"], **GREEDY}
            new = model.generate(inputs_embeds=embeds, cache_implementation="static", **common)
            assert torch.equal(model.generate(**inputs, **GREEDY)[:, -NEW:], new)

    def test_generate_with_static_cache(self: Any) -> None:
        for model, inputs in self._models():
            output = model.generate(
                **inputs, **GREEDY, cache_implementation="static", return_dict_in_generate=True
            )
            assert isinstance(output.past_key_values, StaticCache)
            assert torch.equal(output.sequences, model.generate(**inputs, **GREEDY))

    def test_past_key_values_format(self: Any) -> None:
        for model, inputs in self._models():
            cache = model(**inputs, use_cache=True).past_key_values
            assert isinstance(cache, DynamicCache)
            rows, length = inputs["input_ids"].shape
            heads = model.config.pass_heads()
            shapes = [tuple(layer.keys.shape) for layer in cache.layers]
            assert shapes == [(rows, held, length, model.config.head_dim) for held in heads]

    def test_generate_continue_from_past_key_values(self: Any) -> None:
        for model, inputs in self._models():
            whole = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 2 * NEW})
            half = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
            mask = torch.ones_like(half.sequences)
            rest = model.generate(
                half.sequences,
                attention_mask=mask,
                past_key_values=half.past_key_values,
                **GREEDY,
            )
            assert torch.equal(rest, whole)

    def test_assisted_decoding_matches_greedy_search(self: Any) -> None:
        for model, inputs in self._models():
            one = {name: value[:1] for name, value in inputs.items()}
            helper = copy.deepcopy(model)
            with torch.no_grad():  # now and then of another opinion
                helper.lm_head.weight += 0.02 * torch.randn_like(helper.lm_head.weight)
            for assistant in (model, helper):
                text = model.generate(**one, **GREEDY, assistant_model=assistant)
                assert torch.equal(text, model.generate(**one, **GREEDY))

    def test_prompt_lookup_decoding_matches_greedy_search(self: Any) -> None:
        for model, inputs in self._models():
            one = {name: value[:1] for name, value in inputs.items()}
            text = model.generate(**one, **GREEDY, prompt_lookup_num_tokens=2)
            assert torch.equal(text, model.generate(**one, **GREEDY))

    def test_left_padding_compatibility(self: Any) -> None:
        for attention in ("eager", "sdpa"):
            for model, inputs in self._models(attention):
                ids = inputs["input_ids"]
                fill = torch.zeros(len(ids), 5, dtype=torch.int64)
                padded = torch.cat((fill, ids), 1)
                mask = torch.cat((fill, torch.ones_like(ids)), 1)
                text = model.generate(padded, attention_mask=mask, **GREEDY)
                assert torch.equal(text[:, 5:], model.generate(**inputs, **GREEDY))

    def test_generate_methods_with_logits_to_keep(self: Any) -> None:
        for model, inputs in self._models():
            whole = model.generate(**inputs, **GREEDY, logits_to_keep=0)
            assert torch.equal(whole, model.generate(**inputs, **GREEDY))

    def test_forward_with_logits_to_keep(self: Any) -> None:
        for model, inputs in self._models():
            last = model(**inputs, logits_to_keep=1).logits
            torch.testing.assert_close(last, model(**inputs).logits[:, -1:], rtol=1e-4, atol=1e-5)

    def test_prepare_inputs_for_generation_kwargs_forwards(self: Any) -> None:
        for model, inputs in self._models():
            given = model.prepare_inputs_for_generation(inputs["input_ids"], use_cache=True, mine=3)
            assert given["mine"] == 3
            assert "input_ids" in inspect.signature(model.forward).parameters

    def test_eager_matches_sdpa_generate(self: Any) -> None:
        texts = [
            [model.generate(**inputs, **GREEDY) for model, inputs in self._models(attention)]
            for attention in ("eager", "sdpa")
        ]
        assert all(torch.equal(one, other) for one, other in zip(*texts, strict=True))

    def test_custom_4d_attention_mask(self: Any) -> None:
        """Three endings of one prompt in one row, each blind to the others."""
        for model, inputs in self._models():
            prompt = inputs["input_ids"][:1, :4]
            endings = torch.tensor([[5], [6], [7]])
            with torch.no_grad():
                apart = model(torch.cat((prompt.expand(3, -1), endings), 1)).logits[:, -1]
                mask = torch.tril(torch.ones(7, 7))
                mask[4:, 4:] = torch.eye(3)
                floating = (1 - mask)[None, None] * torch.finfo(torch.float32).min
                together = model(
                    torch.cat((prompt, endings.T), 1),
                    attention_mask=floating,
                    position_ids=torch.tensor([[0, 1, 2, 3, 4, 4, 4]]),
                ).logits[0, 4:]
            torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)

    def test_generate_after_save_and_load(self: Any) -> None:
        for model, inputs in self._models():
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                again = AutoModelForCausalLM.from_pretrained(folder)
                text = again.generate(**inputs, **GREEDY)
            assert torch.equal(text, model.generate(**inputs, **GREEDY))

    def test_generate_compile_model_forward_fullgraph(self: Any) -> None:
        for model, inputs in self._models():
            plain = model.generate(**inputs, **GREEDY)
            torch._dynamo.reset()
            model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
            text = model.generate(**inputs, **GREEDY, cache_implementation="static")
            assert torch.equal(text, plain)
