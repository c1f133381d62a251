"""Tokenizers of random models. Functions import what they need: the command line starts without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.doctor.models import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
"""One token for every byte, and the special tokens."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TOKENIZER_TEXT = """\
In a synchronous step every response of the batch must finish before training can go on. Lengths
are skewed: most responses are short, a few are long, and the long ones run alone at the end.
Many small replicas serve the full batch best, because no layer waits for another device; one wide
group serves the last sequences best, because every device reads only a part of the weights.
The question is therefore not which layout is best, but when to change from one to the next.
Write a short story about a river. What is the sum of 12 and 30? The answer is 42. Explain why the
sky is blue, step by step, and then list three numbers: 1, 2, 3. Let x be the number of apples.
If Anna has three times as many apples as Ben, and together they have 24, how many has each of them?
"""


def save_tokenizer(path: Path, vocab: int, max_length: int) -> None:
    """Write a tokenizer with exactly `vocab` tokens: of bytes, or of words if bytes don't fit."""
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=(_byte_tokenizer if vocab >= MIN_VOCAB else _word_tokenizer)(vocab),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)


def _byte_tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE.

    About 500 tokens are learnt from `TOKENIZER_TEXT`; the rest are words that no merge produces:
    text is never encoded to them, but whatever id the model samples decodes to text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def byte_level(model: models.BPE) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    learnt = byte_level(models.BPE())
    learnt.train_from_iterator(
        [TOKENIZER_TEXT],
        trainers.BpeTrainer(
            vocab_size=min(vocab, 512),
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    trained: dict[str, Any] = json.loads(learnt.to_str())["model"]
    ids: dict[str, int] = trained["vocab"]
    # "Ġ" is byte-level BPE's way to write a space.
    ids |= {f"Ġw{index}": index for index in range(len(ids), vocab)}
    tokenizer = byte_level(models.BPE(vocab=ids, merges=[tuple(m) for m in trained["merges"]]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _word_tokenizer(vocab: int) -> Tokenizer:
    """The words "w3", "w4" and so on, divided by spaces; every other word is padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(len(SPECIAL_TOKENS), vocab))]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL_TOKENS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
