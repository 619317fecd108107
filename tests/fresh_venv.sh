#!/bin/sh
# Loads exports and generates in a virtual environment that holds torch, transformers and safetensors
# only, as someone has it who was given nothing but the folders. Downloads torch; 3 if pip cannot.
# Usage: tests/fresh_venv.sh EXPORT... (folders that `sgt-ds convert` wrote, with a tokenizer)
# TRANSFORMERS=5.23.0 takes that version in place of the one that the tests run with.
set -eu

[ $# -gt 0 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
trap 'exit 1' HUP INT TERM  # not every shell takes these for its exit
cp "$here/constraints.txt" "$place/"
[ -z "${TRANSFORMERS:-}" ] ||
    sed -i "s/^transformers==.*/transformers==$TRANSFORMERS/" "$place/constraints.txt"
"${PYTHON:-python3}" -m venv "$place/venv"
# Uncompiled: of the files of torch and transformers few are imported here.
"$place/venv/bin/pip" install --quiet --no-compile --constraint "$place/constraints.txt" \
    torch transformers safetensors || exit 3
folders=""
for folder in "$@"; do folders="$folders $(cd "$folder" && pwd)"; done
cd "$place"
# shellcheck disable=SC2086  # a list of folders
HF_HOME="$place/home" HF_HUB_OFFLINE=1 "$place/venv/bin/python" - $folders <<'PYTHON'
import importlib.util
import sys

import torch
import transformers

assert importlib.util.find_spec("sgt_ds") is None
print("torch", torch.__version__, " transformers", transformers.__version__)
for folder in sys.argv[1:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompts = tokenizer(["Once upon a time", "The"], return_tensors="pt", padding=True)
    prompts.pop("token_type_ids", None)
    plain = model.generate(**prompts, max_new_tokens=16, do_sample=False)
    for how in ({"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}):
        text = model.generate(**prompts, max_new_tokens=16, do_sample=False, **how)
        assert "num_beams" in how or torch.equal(text, plain), how
    print(type(model).__name__, repr(tokenizer.decode(plain[0], skip_special_tokens=True)))
PYTHON
