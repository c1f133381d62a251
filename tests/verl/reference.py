"""What transformers computes from a checkpoint, which an engine's tokens are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.verl.models import KNOWN
from tests.verl.servers import Pictured, Response

CLOSE = 5e-5
"""float32: sums in another order. Measured: 5e-6."""


class Reference:
    """What a checkpoint generates by transformers, ids beyond the tokenizer's `known` masked."""

    def __init__(self, model: Path, known: int = KNOWN, images: bool = False) -> None:
        """Load it. `images`: it is of a class that also takes images."""
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

        self._torch, self._known = torch, known
        auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
        self._model = auto.from_pretrained(model, dtype=torch.float32)
        self._processor = AutoProcessor.from_pretrained(model) if images else None
        config = self._model.config
        # verl lets no policy say them, as no image is behind.
        self._banned = [config.image_token_id, config.video_token_id] if images else []

    def logits(self, prompt: Sequence[int], response: Sequence[int]) -> Any:
        """[token, id], after each prefix; not masked."""
        with self._torch.no_grad():
            ids = self._torch.tensor([[*prompt, *response]])
            seen = self._seen(prompt, ids) if isinstance(prompt, Pictured) else {}
            return self._model(ids, **seen).logits[0, len(prompt) - 1 : -1]

    def _seen(self, prompt: Pictured, ids: Any) -> dict[str, Any]:
        """A model's arguments for images."""
        assert self._processor is not None
        seen = self._processor.image_processor(images=prompt.images, return_tensors="pt")
        places = (ids == self._model.config.image_token_id).int()
        return {**seen, "mm_token_type_ids": places}

    def logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> Any:
        """[token, id]."""
        logits = self.logits(prompt, response)
        logits[:, self._known :] = -math.inf
        logits[:, self._banned] = -math.inf
        return logits.log_softmax(-1)

    def errors(self, prompt: Sequence[int], response: Response) -> list[float]:
        """How far each token's log-probability is off."""
        assert len(response.logprobs) == len(response.token_ids)
        table = self.logprobs(prompt, response.token_ids)
        return [
            abs(float(row[token]) - logprob)
            for row, token, logprob in zip(
                table, response.token_ids, response.logprobs, strict=True
            )
        ]

    def check(
        self,
        responses: Sequence[Response],
        prompts: Sequence[Sequence[int]],
        close: float = CLOSE,
    ) -> None:
        """The responses are this model's, greedily sampled."""
        for prompt, response in zip(prompts, responses, strict=True):
            assert response.token_ids
            assert max(self.errors(prompt, response)) < close, self.errors(prompt, response)
            best = self.logprobs(prompt, response.token_ids).max(-1).values.tolist()
            chosen = list(response.logprobs)
            assert all(b - c < 2 * close for b, c in zip(best, chosen, strict=True))
