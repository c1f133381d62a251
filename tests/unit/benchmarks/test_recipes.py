"""Which made-up example scripts PAT serves, and what is read of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipe_files import at, config_of, overrides_of
from benchmarks.recipes import count, nemo_rl_recipe, scripts_of, verl_script

SHELL = """
# actor_rollout_ref.rollout.n=1
MODEL=${MODEL:-"${HOME}/models/Qwen3-8B"}   # a comment
GPUS=$((2 * 4)); DRAFTS=
MODE=${1:-text}
case "${MODE}" in
    text | chat)
        TP=2 ;;
    *) TP=16 ;;
esac
if [ -n "$DRAFTS" ] && [ "$MODE" = text ]; then MORE=(+actor_rollout_ref.rollout.x=1)
elif [ "$MODE" != text ]; then
    MORE=(actor_rollout_ref.rollout.x=2)
else
    MORE=("++actor_rollout_ref.rollout.x='3'")
fi
python -m trainer \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.model.path="$MODEL" trainer.n_gpus_per_node=${GPUS} "${MORE[@]}"
"""


def test_overrides_are_those_of_the_branches_taken() -> None:
    found = overrides_of(SHELL)
    rollout = {"x": 3, "name": "vllm", "tensor_model_parallel_size": 2}
    model = {"path": "/models/Qwen3-8B"}
    assert found == {
        "actor_rollout_ref": {"rollout": rollout, "model": model},
        "trainer": {"n_gpus_per_node": 8},
    }


@pytest.mark.parametrize(
    ("more", "reasons"),
    [
        ("", set()),
        ("+actor_rollout_ref.rollout.quantization=fp8", set()),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", set()),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=16", {"wider than a node"}),
        ("actor_rollout_ref.rollout.expert_parallel_size=4", {"EP"}),
        ("actor_rollout_ref.model.lora_rank=8", {"LoRA, not merged"}),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora.merge=True", set()),
        ("data.image_key=images", {"images of Qwen3ForCausalLM"}),
        ("data.image_key=images actor_rollout_ref.model.path=Qwen3-VL-8B", set()),
        (
            "data.image_key=images actor_rollout_ref.model.path=Qwen3-VL-8B "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_type=shm",
            {"mm_processor_cache_type"},
        ),
        (
            "data.image_key=images actor_rollout_ref.model.path=Gemma-4-E4B",
            {"class not known", "images of Gemma4"},
        ),
        (
            "actor_rollout_ref.model.path=Gemma-4-E4B",
            {"class not known", "`language_model_only` is not set"},
        ),
        ("actor_rollout_ref.model.path=Qwen3.5-9B", set()),
        ("actor_rollout_ref.model.path=DeepSeek-V4-Flash", {"class not known"}),
        ("actor_rollout_ref.model.path=Nemotron-3-Nano-30B-A3B", {"experts of NemotronH"}),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.watermark_config=x", {"watermark_config"}),
    ],
)
def test_scripts_of_verl(more: str, reasons: set[str]) -> None:
    script = verl_script("a.sh", f"{SHELL.rstrip()} {more}")
    assert script is not None and script.reasons == reasons
    assert script.fp8 == ("fp8" in more)
    assert verl_script("a.sh", SHELL.replace("name=vllm", "name=sglang")) is None


BASE = """
policy:
  model_name: Qwen/Qwen3-30B-A3B
  precision: bfloat16
  generation:
    backend: vllm
    vllm_cfg: {precision: "${policy.precision}", tensor_parallel_size: 4}
    vllm_kwargs: {}
cluster: {gpus_per_node: 8}
"""


@pytest.mark.parametrize(
    ("generation", "reasons"),
    [
        ("vllm_cfg: {precision: fp8, kv_cache_dtype: fp8}", set()),
        ("vllm_cfg: {precision: fp8, is_mx: true}", {"MXFP8"}),
        ("vllm_cfg: {expert_parallel_size: 8}", {"EP", "DP in one engine"}),
        ("vllm_cfg: {tensor_parallel_size: 16}", {"wider than a node"}),
        ("vllm_kwargs: {moe_backend: triton, attention_backend: FLASH_ATTN}", set()),
        ("vllm_kwargs: {kernel_config: {moe_backend: marlin}}", {"moe_backend"}),
        ("vllm_kwargs: {compilation_config: {backend: eager}}", set()),
        ("vllm_kwargs: {speculative_config: {method: mtp}}", set()),
        ("vllm_kwargs: {speculative_config: {method: deepseek_mtp}}", set()),
        ("vllm_kwargs: {speculative_config: {method: medusa}}", {"drafter"}),
        ("{quant_cfg: a.yaml, real_quant: true}", {"NVFP4"}),
    ],
)
def test_recipes_of_nemo_rl(tmp_path: Path, generation: str, reasons: set[str]) -> None:
    recipes = tmp_path / "examples" / "configs" / "recipes"
    recipes.mkdir(parents=True)
    (recipes.parent / "base.yaml").write_text(BASE)
    text = f"defaults: ../base.yaml\npolicy:\n  generation:\n    {generation}\n"
    (recipes / "a.yaml").write_text(text.replace("generation:\n    {", "generation: {"))
    assert at(config_of(recipes / "a.yaml"), "cluster.gpus_per_node") == 8
    (script,) = scripts_of("nemo-rl", tmp_path)
    assert script.reasons == reasons and script.fp8 == ("fp8" in generation)
    said = count("nemo-rl", tmp_path, [script], with_list=True)
    assert f"| 1 | {int(not reasons)} | {int(bool(reasons))} |" in said
    assert nemo_rl_recipe("a.yaml", {"policy": {"generation": {"backend": "megatron"}}}) is None
