"""What the doctor asks vLLM: facts of this machine and of an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor.child import Events
from pat_vllm.doctor.environment import (
    FACTS,
    EnvironmentFacts,
    environment_checks,
    inspect_environment,
)
from pat_vllm.models.model_size import ModelSize
from tests.support.models import random_model

MISTRAL = """{
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 512,
    "sliding_window": 128
}"""


def facts_of(model: Path, **options: Any) -> EnvironmentFacts:
    """What an engine with PAT would be here, as the doctor's child tells it."""
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": {}},
        **options,
    }
    facts = inspect_environment(engine, Events())
    return FACTS.validate_python(json.loads(FACTS.dump_json(facts)))


def test_an_engine_that_can_run() -> None:
    facts = facts_of(random_model("qwen3"))
    assert (facts.platform, facts.refused, facts.runner) == ("cpu", None, "V1")
    assert facts.attention == "CPU_ATTN"
    assert facts.config["num_key_value_heads"] == 4
    assert 0 < facts.free <= facts.memory


@pytest.mark.parametrize(
    ("model", "attention"), [("deepseek_v3", "CPU_MLA"), ("qwen3_next", "CPU_ATTN")]
)
def test_latent_and_linear_attention(model: str, attention: str) -> None:
    """And sizes are those of the config, whose kinds of layers are a list."""
    folder = random_model(model)
    facts = facts_of(folder)
    assert (facts.refused, facts.attention) == (None, attention)
    given = json.loads((folder / "config.json").read_text())
    assert ModelSize.of(facts.config) == ModelSize.of(given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora": True}, 'distributed_executor_backend="pat" does not support enable_lora='),
        (
            {"additional_config": {"pat": {"x": 1}}},
            "additional_config[\"pat\"]: unknown option 'x'",
        ),
        ({"block_size": "x"}, "vLLM: block_size: Input should be a valid integer"),
        ({"tensor_parallel_size": 3}, "vLLM: Total number of attention heads (8) must be"),
        ({"no_such": 1}, "vLLM: EngineArgs.__init__() got an unexpected keyword"),
    ],
)
def test_an_engine_that_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """By PAT or by vLLM for an option: in one sentence, without what pydantic puts around it."""
    (tmp_path / "config.json").write_text(MISTRAL)
    facts = facts_of(tmp_path, **options)
    assert facts.refused is not None and facts.refused.startswith(words)
    assert "Value error" not in facts.refused and "[type=" not in facts.refused
    assert not any(
        "vLLM would choose" in check.name for check in environment_checks(facts, 2, True)
    )
