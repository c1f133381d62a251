"""What the config.json of the doctor's random models says."""

from __future__ import annotations

import pytest

from pat_vllm.doctor.models import SHAPES, shape_named


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_ranks_can_share_a_model(shape: str, ranks: int) -> None:
    config = shape_named(shape).config_for(ranks)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert heads % ranks == config["intermediate_size"] % ranks == heads % kv_heads == 0
    assert config["hidden_size"] % heads == 0
    linear = (config.get(f"linear_num_{which}_heads", 0) for which in ("key", "value"))
    assert not any(number % ranks for number in linear)


def test_latent_attention_has_kernels_on_hopper() -> None:
    """vLLM has none for prompts of other widths on CUDA (`behaviour.py`)."""
    config = SHAPES["latent"].config
    widths = [config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    assert widths == [128, 64, 128]
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576


@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if shape.experts])
def test_no_expert_is_chosen_by_rounding(shape: str) -> None:
    config = SHAPES[shape].config
    (experts,) = (value for name, value in config.items() if name in EXPERTS)
    assert config["num_experts_per_tok"] == experts
    assert config.get("topk_group") == config.get("n_group")


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def test_a_shape_that_is_not_there_is_named_with_those_that_are() -> None:
    allowed = "dense, large, mixture, linear, latent, window, sinks, mtp"
    with pytest.raises(ValueError, match=f"--shape 'huge' is not known; allowed: {allowed}"):
        shape_named("huge")
