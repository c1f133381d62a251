"""What the doctor asks vLLM: facts of this machine and of an engine, and when steps are timed."""

from __future__ import annotations

import itertools
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pat_vllm.doctor import steps
from pat_vllm.doctor.environment import FACTS, Facts, Question, environment_checks, look
from pat_vllm.doctor.journal import Journal
from tests.support.models import random_model

MISTRAL = """{
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 512,
    "sliding_window": 128
}"""


def facts_of(model: Path, **options: Any) -> Facts:
    """What an engine with PAT would be here, as the doctor's child tells it."""
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": {}},
        **options,
    }
    facts = look(Question(engine), Journal(StringIO()))
    return FACTS.validate_json(FACTS.dump_json(facts))


def test_an_engine_that_can_run() -> None:
    facts = facts_of(random_model("qwen3"))
    assert (facts.platform, facts.refused, facts.runner) == ("cpu", None, "V1")
    assert facts.attention == "CPU_ATTN"
    assert facts.config["num_key_value_heads"] == 4
    assert 0 < facts.free <= facts.memory


@pytest.mark.parametrize(
    ("options", "words"), [({}, "sliding_window=128"), ({"block_size": "x"}, "vLLM: ")]
)
def test_an_engine_that_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """By PAT for its model, or by vLLM for an option."""
    (tmp_path / "config.json").write_text(MISTRAL)
    facts = facts_of(tmp_path, **options)
    assert facts.refused is not None and words in facts.refused
    assert not any("vLLM would choose" in one.name for one in environment_checks(facts, 2, True))


class FakeEngine:
    """Each request gets a token at each step; a step takes a tick."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.left: dict[str, int] = {}

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.left[name] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        # The first steps admit requests, and take longer.
        self.clock[0] += 1.0 if max(self.left.values()) > 60 else 0.01
        names = [*self.left]
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return [SimpleNamespace(request_id=name) for name in names]


def test_steps_are_timed_once_they_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock[0])
    llm: Any = SimpleNamespace(llm_engine=FakeEngine(clock))
    gaps = steps._gaps(llm, ((5, 6), (7,)), itertools.count())
    assert len(gaps) == 2 * (steps._TOKENS - steps._UNSETTLED - 1)
    assert gaps == pytest.approx([0.01] * len(gaps))
