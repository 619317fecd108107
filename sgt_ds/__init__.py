"""Pre-train LLaMA-style models with DeepSpeed ZeRO-2 and grow their depth while they train."""

__version__ = "0.1.0"
