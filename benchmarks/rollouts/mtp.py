"""A small MiMo that is trained with its MTP module, for `benchmarks.bench --drafts`.

    python -m benchmarks.rollouts.mtp

It says problems and solutions one after the other without an end, as requests of given lengths
need. The module learns from what the model has computed, without a gradient to it: the token after
the next by the model's hidden states, and the one after that by its own, as it drafts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.batch import Request
from benchmarks.record import ROOT
from benchmarks.rollouts.arithmetic import problem, solution
from benchmarks.rollouts.model import make_tokenizer, optimize, question_tokens
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.doctor.models import SPECIAL_TOKENS

MODEL = ROOT / ".models" / "rollouts" / "mtp"
SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=768,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
WINDOW, BATCH = 256, 12
"""Tokens of a piece of text, and pieces of a step of the optimizer."""
TOKENS = 800_000
"""Of the training: 10 minutes of a core."""
SECOND = 0.5
"""Weight of the second draft's loss."""


def model_with_mtp(path: Path = MODEL) -> Path:
    """The model's folder; it is trained on the first call."""
    if not path.exists():
        train(path)
    return path


def train(path: Path, tokens: int = TOKENS, seed: int = 0) -> None:
    """Train the model and its module in float32, and write them to the directory `path`."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    bos, eos, pad = range(len(SPECIAL_TOKENS))
    config = Qwen2Config(
        vocab_size=len(tokenizer), bos_token_id=bos, eos_token_id=eos, pad_token_id=pad, **SHAPE
    )
    model = Qwen2ForCausalLM(config).train()
    module = _module(config)
    whole = torch.nn.ModuleDict({"model": model, "mtp": module}).train()
    optimize(whole, [], _batches(tokenizer, partial(_loss, model, module), seed), tokens)

    path.mkdir(parents=True)
    tokenizer.save_pretrained(path)
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    kept = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    (path / "config.json").write_text(json.dumps(kept | more, indent=1))
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    for name, weight in module.state_dict().items():
        weights[f"model.mtp_layers.0.{name.removeprefix('block.')}"] = weight.contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _module(config: Any) -> Any:
    """The MTP module, with vLLM's names for its parts."""
    from torch import nn
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

    hidden = config.hidden_size
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    parts: dict[str, nn.Module] = {name: Qwen2RMSNorm(hidden) for name in norms}
    config._attn_implementation = "sdpa"
    parts["input_proj"] = nn.Linear(2 * hidden, hidden, bias=False)
    parts["block"] = Qwen2DecoderLayer(config, layer_idx=0)
    return nn.ModuleDict(parts)


def _loss(model: Any, module: Any, ids: Any) -> Any:
    """Of the next token, and of the module's two drafts behind it.

    Args:
        ids: token ids, int64 [pieces, `WINDOW`].
    """
    import torch

    def cross_entropy(hidden: Any, ahead: int) -> Any:
        logits = model.lm_head(hidden[:, : ids.shape[1] - ahead])
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, ahead:].flatten()
        )

    hidden = model.model(input_ids=ids).last_hidden_state
    loss = cross_entropy(hidden, 1)
    of_module = hidden.detach()
    for draft, weight in ((1, 1.0), (2, SECOND)):
        # At each position, the token that the last draft was to be.
        of_module = of_module[:, : ids.shape[1] - draft]
        of_module = _draft(model, module, of_module, ids[:, draft:], first=draft - 1)
        loss = loss + weight * cross_entropy(of_module, draft + 1)
    return loss


def _draft(model: Any, module: Any, hidden: Any, ids: Any, first: int) -> Any:
    """A pass of the module, as vLLM makes it: hidden states [pieces, tokens, hidden_size].

    Args:
        first: position of the first token.
    """
    import torch

    positions = torch.arange(first, first + ids.shape[1])[None]
    embedded = model.model.embed_tokens(ids) * (positions > 0)[..., None]
    joined = torch.cat(
        [module["hidden_layernorm"](hidden), module["token_layernorm"](embedded)], -1
    )
    output = module["block"](
        module["input_proj"](joined),
        attention_mask=None,
        position_embeddings=model.model.rotary_emb(hidden, positions),
    )
    return module["final_layernorm"](output)


def _batches(
    tokenizer: Any, loss: Callable[[Any], Any], seed: int
) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Pieces of text without an end: tokens of each batch, and what computes its loss."""
    import torch

    rng = random.Random(f"mtp/{seed}")
    text: list[int] = []
    while True:
        while len(text) < BATCH * WINDOW:
            task = problem(rng)
            text += question_tokens(tokenizer, task)
            text += [*tokenizer.encode(solution(rng, task)), tokenizer.eos_token_id]
        ids, text = torch.tensor(text[: BATCH * WINDOW]).view(BATCH, WINDOW), text[BATCH * WINDOW :]
        yield BATCH * WINDOW, partial(loss, ids)


def requests_of(trace: LengthTrace, path: Path, seed: int) -> tuple[Request, ...]:
    """Problems as prompts, of a trace's sizes; requests of a group have the same."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)

    def prompt(group: int, tokens: int) -> tuple[int, ...]:
        rng = random.Random(f"bench/{seed}/{group}")
        text: Sequence[int] = ()
        while len(text) < tokens:
            text = [*text, *question_tokens(tokenizer, problem(rng))]
        return tuple(text[:tokens])

    return tuple(
        Request(prompt(group, tokens), length, arrival)
        for group, tokens, length, arrival in zip(
            trace.groups, trace.num_prompt_tokens, trace.lengths, trace.arrivals, strict=True
        )
    )


if __name__ == "__main__":
    model_with_mtp()
