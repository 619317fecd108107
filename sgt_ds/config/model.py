"""Model shapes and the presets. Knows no torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)


class Section(BaseModel):
    """A part of the run's configuration: immutable, and no key that it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML's `true` and `yes` would count as 1.
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation not in (bool, bool | None):
            raise ValueError(f"is {str(value).lower()}, which is not a valid value for this key")
        return value


Decay = Annotated[float, Field(ge=0, lt=1)]

# Vocabulary rows are padded to this multiple, which tensor cores and sharding want.
VOCABULARY_MULTIPLE = 128


class ModelConfig(Section):
    """Shape of a LLaMA-style decoder: RMSNorm, RoPE, SwiGLU, untied embeddings, no bias, MHA."""

    hidden_size: PositiveInt
    """Width of the residual stream (d)."""
    intermediate_size: PositiveInt
    """Width of the feed-forward network (f)."""
    num_layers: PositiveInt
    """Transformer blocks."""
    num_heads: PositiveInt
    """Attention heads per block."""
    vocab_size: PositiveInt
    """Number of tokenizer ids (V); the embedding is padded with extra rows."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of the RMSNorms."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the normal initialisation, truncated at three standard deviations."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 2 × num_heads "
                f"({2 * self.num_heads}); RoPE needs an even head size"
            )
        return self

    @property
    def head_size(self) -> int:
        """Width of one head (d_h)."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output matrix."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def padding_rows(self) -> int:
        """How many of these rows no id of the vocabulary has."""
        return self.padded_vocab_size - self.vocab_size


GPT_NEOX_VOCABULARY = 50280

# Keys in which a model that bears a preset's name is that preset; a vocabulary is the tokenizer's.
SHAPE = ("hidden_size", "intermediate_size", "num_layers", "num_heads")

PRESETS: dict[str, ModelConfig] = {
    # For tests: every mechanism, no capacity.
    "tiny": ModelConfig(
        hidden_size=64, intermediate_size=160, num_layers=6, num_heads=4, vocab_size=512
    ),
    # About 2 M parameters: learns short stories on two CPU cores in minutes.
    "demo": ModelConfig(
        hidden_size=128, intermediate_size=384, num_layers=8, num_heads=4, vocab_size=2000
    ),
    # The paper's three models (appendix, table of model configurations).
    "275m": ModelConfig(
        hidden_size=768,
        intermediate_size=6144,
        num_layers=12,
        num_heads=12,
        vocab_size=GPT_NEOX_VOCABULARY,
    ),
    "573m": ModelConfig(
        hidden_size=1024,
        intermediate_size=8192,
        num_layers=16,
        num_heads=16,
        vocab_size=GPT_NEOX_VOCABULARY,
    ),
    "1.2b": ModelConfig(
        hidden_size=1536,
        intermediate_size=12288,
        num_layers=16,
        num_heads=16,
        vocab_size=GPT_NEOX_VOCABULARY,
    ),
}
