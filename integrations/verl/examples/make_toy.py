"""A random model and a dataset for `grpo.sh`: small enough for a CPU.

The model ends a response at any of several tokens, as chat models do at two or three, and chooses
tokens nearly at random: most of its responses are short, and a few are long.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file, save_file

from pat_vllm.cli.random_model import RandomModelOptions
from pat_vllm.cli.random_tokenizer import save_tokenizer
from pat_vllm.doctor.models import Weights, write_checkpoint

VOCAB = 512
END_TOKENS = 12
FLATTER = 0.25
"""Factor on the logits; with peaked ones some prompts would end at once and others never."""
QUESTIONS = [f"What is the sum of {a} and {b}?" for a in range(1, 9) for b in range(10, 14)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    if directory.exists():
        return

    model = directory / "model"
    sizes = RandomModelOptions(hidden=128, heads=8, kv_heads=4, vocab=VOCAB)
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    write_checkpoint(model, sizes.config | llama, Weights())
    save_tokenizer(model, VOCAB, sizes.max_position_embeddings)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= FLATTER
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    end_tokens = [1, *range(VOCAB - END_TOKENS + 1, VOCAB)]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end_tokens}))

    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(QUESTIONS)
    ]
    pd.DataFrame(rows).to_parquet(directory / "train.parquet")


if __name__ == "__main__":
    main()
