"""Print how an exported model continues some texts, with stock transformers. Imports no sgt_ds.

Run as a file of its own: `python -I sgt_ds/demo/speak.py EXPORT TEXT…`
"""

from __future__ import annotations

import sys

NEW_TOKENS = 80
TEMPERATURE = 0.5


def main(export: str, prompts: list[str]) -> None:
    """Print each prompt with its continuation, one a line."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True).eval()
    for prompt in prompts:
        torch.manual_seed(0)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        )
        start = inputs["input_ids"].shape[1]
        continuation = tokenizer.decode(output[0, start:], skip_special_tokens=True)
        print(f"{prompt} | {' '.join(continuation.split())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
