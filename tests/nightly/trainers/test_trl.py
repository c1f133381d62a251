"""TRL's server and its trainer, with PAT by one word: `--distributed_executor_backend pat`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.network_utils import get_open_port

from tests.nightly.trainers import need
from tests.support.engines import Job, Outcome
from tests.support.models import random_model
from tests.support.serve import Server
from tests.support.stock import stock_answers

need("trl")

SUPPORT = Path(__file__).parents[2] / "support"
OLD, NEW = "qwen3", "qwen3_updated"
TOLERANCE = 2e-4  # of log-probabilities; tests/engine/test_switch.py says why
PROMPTS = [[5 + i, 6, 7, 8 + i, 9] for i in range(6)]


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """Here and in child processes, stand-ins for what needs CUDA."""
    path = [str(SUPPORT / "trl_on_cpu"), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.syspath_prepend(path[0])
        import sitecustomize  # noqa: F401

        yield


@pytest.fixture(scope="module")
def server(on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`trl vllm-serve`, as its documentation starts it; what TRL does not know goes to vLLM."""
    server = Server(
        tmp_path_factory.mktemp("trl") / "serve.log",
        {"weights": "inplace", "policy": {"kind": "schedule", "switch_at": {"3": 2}}},
        program=(str(Path(sys.executable).with_name("trl")), "vllm-serve"),
        **{
            "model": random_model(OLD),
            "served-model-name": OLD,
            "weight-transfer-config": json.dumps({"backend": "sockets"}),
            "worker-extension-cls": "tests.support.updates_by_layer.UpdatesByLayer",
            "speculative-config": None,
        },
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(server.url)
    client.init_communicator()
    yield client
    client.close_communicator()


def answers(model: str) -> dict[str, Outcome]:
    """What stock vLLM generates."""
    sampling = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    jobs = {str(i): Job(p, sampling | {"max_tokens": 8 + 8 * i}) for i, p in enumerate(PROMPTS)}
    return stock_answers(model, jobs)


def generate(client: Any, index: int) -> Any:
    return client.generate(
        [PROMPTS[index]],
        temperature=0.0,
        max_tokens=8 + 8 * index,
        logprobs=0,
        generation_kwargs={"ignore_eos": True},
    )


def check(client: Any, model: str) -> None:
    """All prompts at once, as a batch whose end is another layout's."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        given = pool.map(lambda index: generate(client, index), range(len(PROMPTS)))
    for answer, wanted in zip(given, answers(model).values(), strict=True):
        assert answer["completion_ids"] == [wanted.token_ids]
        logprobs = [value for (value,) in answer["logprobs"][0]]
        assert logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)


def update(client: Any, model: str) -> None:
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(random_model(model), dtype="float32")
    client.update_model_params(trained)
    client.reset_prefix_cache()


def test_trls_client(server: Server, client: Any) -> None:
    """Completions and log-probabilities in both layouts, before and after new weights."""
    assert client.get_world_size() == 2
    for model in (OLD, NEW, OLD):
        update(client, model)
        check(client, model)
        for tp in (1, 2):
            server.switch(tp)
            check(client, model)
    report = server.report()
    assert {
        (switch.source.tp, switch.target.tp)
        for switch in report.switches
        if switch.reason == "policy"
    }
    wanted = list(answers(OLD).values())
    sequences = [[*p, *answer.token_ids] for p, answer in zip(PROMPTS, wanted, strict=True)]
    scores = client.get_sequence_logprobs(sequences, [len(prompt) for prompt in PROMPTS], 1)
    for given, answer in zip(scores["actual_logprobs"], wanted, strict=True):
        assert [v for (v,) in given] == pytest.approx(answer.logprobs, abs=TOLERANCE)


def test_requests_during_an_update_wait(server: Server, client: Any) -> None:
    """TRL does not pause: a request that another client sends gets the new weights."""
    from transformers import AutoModelForCausalLM

    update(client, OLD)
    trained = AutoModelForCausalLM.from_pretrained(random_model(NEW), dtype="float32")
    with ThreadPoolExecutor(1) as pool:
        with client.weight_update():
            for i, (name, weight) in enumerate(trained.named_parameters()):
                client.update_named_param(name, weight.data)
                if i == 3:
                    answer = pool.submit(generate, client, 2)
        assert answer.result()["completion_ids"] == [answers(NEW)["2"].token_ids]
    update(client, OLD)


def test_grpo(server: Server, client: Any, tmp_path: Path) -> None:
    """TRL's trainer: rollouts are of the weights that it trains, in each layout in turn."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Switches(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            server.switch((2, 1)[state.global_step % 2])

    client.close_communicator()
    trainer = GRPOTrainer(
        model=str(random_model(OLD)),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": [f"Question {i}" for i in range(8)]}),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=24,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.url,
            vllm_group_port=get_open_port(),
            model_init_kwargs={"dtype": "float32"},
        ),
        callbacks=[Switches()],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 4 and all(log["grad_norm"] > 0 for log in logs)
    for log in logs:
        assert log["sampling/sampling_logp_difference/max"] < 1e-3
