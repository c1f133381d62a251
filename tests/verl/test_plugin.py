"""How PAT gets into verl, with verl's own classes but no engine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import verl
from omegaconf import OmegaConf
from pat_verl import plugin
from verl.workers.rollout import replica as verl_replica
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry, get_rollout_replica_class


def trainer_config(**changes: Any) -> Any:
    """verl's defaults, with changes of the rollout."""
    from hydra import compose, initialize_config_dir

    overrides = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in changes.items()]
    directory = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=directory, version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.model.path=/none", *overrides])


def config(**changes: Any) -> Any:
    """verl's defaults of a rollout, as its trainer has them, with changes."""
    return trainer_config(**changes).actor_rollout_ref.rollout


def with_pats_executor(rollout: Any) -> Any:
    OmegaConf.update(
        rollout, "engine_kwargs.vllm.distributed_executor_backend", "pat", force_add=True
    )
    return rollout


def test_verl_finds_the_entry_point() -> None:
    """Once: to register again changes nothing."""
    from pat_verl.adapter import PatServerAdapter
    from pat_verl.replica import PatReplica

    assert get_rollout_replica_class("pat") is PatReplica
    assert get_rollout_class("pat", "async") is PatServerAdapter
    before = dict(RolloutReplicaRegistry._registry)
    plugin.register()
    assert RolloutReplicaRegistry._registry == before


@pytest.mark.parametrize("max_num_seqs", [16, 2000])
@pytest.mark.parametrize(("name", "asked"), [("pat", True), ("vllm", True), ("vllm", False)])
def test_both_ways_to_ask_for_pat_and_neither(name: str, asked: bool, max_num_seqs: int) -> None:
    from pat_verl.server import PatHttpServer
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    rollout = config(name=name, max_num_seqs=max_num_seqs, tensor_model_parallel_size=4)
    if asked and name == "vllm":
        with_pats_executor(rollout)
    replica = get_rollout_replica_class(name)(0, rollout, None, 8)
    base = replica.server_class.__ray_metadata__.modified_class.__mro__[1]
    assert base is (PatHttpServer if asked else vLLMHttpServer)
    # Of each inner replica, which stands for a server of verl's: what it runs, or Ray's calls.
    servers = 4 if asked else 1
    assert replica.max_concurrency == max(servers * max_num_seqs + 16, servers * 1000)
    assert replica._get_server_name_prefix() == f"{name}_"
    if asked:
        with pytest.raises(ValueError, match="tensor_model_parallel_size=4 on nodes with 2 GPUs"):
            get_rollout_replica_class(name)(0, rollout, None, 2)


def test_a_trainers_config_is_checked_before_anything_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from verl.trainer import main_ppo

    def check(**changes: Any) -> None:
        full = trainer_config(**changes)
        full.actor_rollout_ref.actor.use_dynamic_bsz = True
        full.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = True
        main_ppo.validate_config(config=full, use_reference_policy=False, use_critic=False)

    check(name="vllm", tensor_model_parallel_size=3)  # not PAT's business
    check(name="pat", tensor_model_parallel_size=8)
    assert "GPUs of a node" not in caplog.text
    check(name="pat", tensor_model_parallel_size=4)
    assert caplog.text.count("a PAT engine over 4 of the 8 GPUs of a node") == 1
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3 on nodes with 8 GPUs"):
        check(name="pat", tensor_model_parallel_size=3)


def test_where_it_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version of verl, no vLLM, a verl without its registry. vLLM's own rollout goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(verl, "__version__", "0.7.0")
        stock = get_rollout_replica_class("vllm")
        stock(0, config(name="vllm"), None, 8)
        for ask in (
            lambda: get_rollout_replica_class("pat"),
            lambda: stock(0, with_pats_executor(config(name="vllm")), None, 8),
        ):
            with pytest.raises(ValueError, match=r"verl 0.7.0 is installed"):
                ask()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "pat_verl.replica", raising=False)
        patch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.vllm_async_server", None)
        with pytest.raises(ImportError, match=r"name=pat needs vLLM.*pat-vllm\[cuda,verl\]"):
            get_rollout_replica_class("pat")
    monkeypatch.delattr(verl_replica, "RolloutReplicaRegistry")
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "rollout.name=pat cannot be used with this verl" in caplog.text


@pytest.mark.parametrize("replica", [0, 1])
def test_pat_options_survive_the_command_line(replica: int) -> None:
    """verl turns the engine's options into command-line arguments, which vLLM parses again."""
    from pat_verl.server import PatHttpServer
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from pat_vllm.config import PATConfig

    pat = {
        "policy": {"kind": "schedule", "switch_at": {4: 2, 8: 1}},
        "layouts": [1, 2],
        "state_dir": "/kept",
    }
    server = object.__new__(PatHttpServer)
    server.config, server.replica_rank = config(name="pat"), replica
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 0]],
    }
    engine_kwargs = {
        "additional_config": OmegaConf.create({"pat": pat, "mine": 1}),
        "speculative_config": OmegaConf.create(drafts),
    }
    server._preprocess_engine_kwargs(engine_kwargs)

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(build_cli_args_from_config(engine_kwargs))
    assert arguments.distributed_executor_backend == "pat"
    assert arguments.additional_config["mine"] == 1
    assert arguments.speculative_config == drafts
    parsed = PATConfig.parse(json.loads(json.dumps(arguments.additional_config))["pat"])
    # What an engine keeps is in a directory of its own.
    own = {"state_dir": f"/kept/engine-{replica}", "launcher": "mp"}
    assert parsed == PATConfig.parse({**pat, **own})


@pytest.mark.parametrize(("method", "level"), [(None, 2), ("ngram", 2), ("eagle3", 1), ("mtp", 1)])
def test_sleep_keeps_weights_that_no_update_brings(method: str | None, level: int) -> None:
    """verl keeps those of an MTP module that its own option asks for."""
    from pat_verl.server import PatHttpServer

    drafts = None if method is None else SimpleNamespace(method=method)
    server = object.__new__(PatHttpServer)
    server.config, server.model_config = config(name="pat"), SimpleNamespace(lora_rank=0, lora={})
    server.engine = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=drafts))
    assert server._resolve_sleep_level() == level


def test_pause_generation_in_both_spellings() -> None:
    from pat_verl.server import _accept_wait_for_inflight_requests

    calls: list[Any] = []

    class Newer:
        async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
            calls.append((mode, clear_cache))

    class Older:
        async def pause_generation(
            self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
        ) -> None:
            calls.append((wait_for_inflight_requests, clear_cache))

    engine: Any
    for engine in (Newer(), Older()):
        _accept_wait_for_inflight_requests(engine)
        asyncio.run(engine.pause_generation(wait_for_inflight_requests=False, clear_cache=False))
        asyncio.run(engine.pause_generation(wait_for_inflight_requests=True))
    assert calls == [("abort", False), ("wait", True), (False, False), (True, True)]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA"])
def test_only_cumulative_outputs_are_joined(kind: str) -> None:
    """What the HTTP server of the same engine asks for, the others, stays as it is."""
    from pat_verl.server import _send_first_and_last_outputs
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind

    def output(tokens: list[int], finished: bool) -> RequestOutput:
        reason = "length" if finished else None
        logprobs: Any = [{token: None} for token in tokens]
        completion = CompletionOutput(0, "", tokens, None, logprobs, finish_reason=reason)
        return RequestOutput("a", None, [1], None, [completion], finished)

    asked: list[SamplingParams] = []

    class Engine:
        async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
            asked.append(sampling_params)
            yield output([5], finished=False)
            yield output([6, 7], finished=True)

    async def collect() -> list[tuple[list[int], int, bool]]:
        params = SamplingParams(output_kind=RequestOutputKind[kind])
        outputs = engine.generate(prompt=[1], sampling_params=params, request_id="a")
        return [
            (
                list(response.outputs[0].token_ids),
                len(response.outputs[0].logprobs),
                response.finished,
            )
            async for response in outputs
        ]

    engine: Any = Engine()
    _send_first_and_last_outputs(engine)
    outputs = asyncio.run(collect())
    assert asked[0].output_kind == RequestOutputKind.DELTA
    if kind == "CUMULATIVE":
        assert asked[0].stream_interval is not None
        assert outputs == [([5], 1, False), ([5, 6, 7], 3, True)]
    else:
        assert asked[0].stream_interval is None and asked[0].detokenize
        assert outputs == [([5], 1, False), ([6, 7], 2, True)]


@pytest.mark.parametrize("stop", [None, "end", ["end", "."]])
def test_only_stop_strings_need_text(stop: Any) -> None:
    """verl reads none, and vLLM refuses to seek them without."""
    from pat_verl.server import _send_first_and_last_outputs
    from vllm import SamplingParams

    asked: list[SamplingParams] = []

    class Engine:
        async def generate(self, prompt: Any, sampling_params: Any) -> Any:
            asked.append(sampling_params)
            yield "an output"

    async def outputs() -> list[Any]:
        return [response async for response in engine.generate([1], SamplingParams(stop=stop))]

    engine: Any = Engine()
    _send_first_and_last_outputs(engine)
    assert asyncio.run(outputs()) == ["an output"]
    assert asked[0].detokenize == (stop is not None)
    asked[0].clone()._verify_args()


@pytest.mark.parametrize("alive", [True, False])
def test_only_a_dead_engine_fails_for_lack_of_a_report(alive: bool) -> None:
    from pat_verl.server import PatHttpServer
    from vllm.v1.engine.exceptions import EngineDeadError

    class Engine:
        async def collective_rpc(self, method: str, args: tuple[float]) -> Any:
            raise EngineDeadError()

        async def check_health(self) -> None:
            if not alive:
                raise EngineDeadError()

    server: Any = object.__new__(PatHttpServer)
    server.engine, server.replica_rank, server.global_steps = Engine(), 0, 1
    server._rollouts, server._responses, server._began, server._ended = 0, 4, 1.0, 2.0
    if alive:
        asyncio.run(server.set_global_steps(2))
        assert server.global_steps == 2
    else:
        for call in (server.set_global_steps(2), server.sleep()):
            with pytest.raises(RuntimeError, match="engine of rollout replica 0 has died"):
                asyncio.run(call)
