"""Servers of trainers, started by their own code: PAT's option passes, and new weights arrive."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import typing_extensions

from tests.engine.test_weight_updates import halves
from tests.nightly.trainers import images, need
from tests.support.engines import Job, Outcome
from tests.support.models import random_model
from tests.support.serve import PATIENCE, Server
from tests.support.stock import stock_answers
from tests.support.vision import PLACE, data_of
from tests.support.weight_transfer import Trainer

OLD, NEW = "qwen3", "qwen3_updated"
POLICY = {"kind": "schedule", "switch_at": {"3": 2}}
TOLERANCE = 2e-4  # of log-probabilities; tests/engine/test_switch.py says why
PROMPTS = [[5 + i, 6, 7, 8 + i, 9] for i in range(6)]
LENGTHS, LONG = [8 + 8 * i for i in range(6)], 800
SAMPLING = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}


class Client:
    """A trainer's end of a server, over HTTP."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def post(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.server.url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return json.loads(response.read() or "null")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from error


Answer = tuple[list[int], list[float]]
"""Token ids and their log-probabilities."""


def completed(client: Client, index: int, tokens: int) -> Answer:
    """vLLM's own route: prime-rl's asks vLLM for what 0.31 has no more (docs/trainers.md)."""
    body = SAMPLING | {"prompt": PROMPTS[index], "max_tokens": tokens, "return_token_ids": True}
    (choice,) = client.post("/v1/completions", body)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def generated(client: Client, index: int, tokens: int) -> Answer:
    """SkyRL's route."""
    params = SAMPLING | {"max_tokens": tokens}
    body = {"token_ids": PROMPTS[index], "sampling_params": params}
    (choice,) = client.post("/skyrl/v1/generate", body)["choices"]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


class OverHTTP:
    """The methods of an engine that `Trainer` asks for, by vLLM's routes."""

    def __init__(self, client: Client) -> None:
        for name in ("init_weight_transfer_engine", "update_weights"):
            setattr(self, name, partial(client.post, f"/{name}"))


def by_prime_rl(client: Client, model: str) -> None:
    """What its orchestrator posts for weights in files."""
    client.post("/pause")
    client.post("/update_weights", {"weight_dir": str(random_model(model))})
    client.post("/resume")


def by_skyrl(client: Client, model: str) -> None:
    """What its control plane posts for weights by collective."""
    if not hasattr(client, "trainer"):
        client.trainer = Trainer(OverHTTP(client), 2)  # type: ignore[attr-defined]
    client.post("/pause?mode=keep&clear_cache=false")
    client.post("/start_weight_update")
    for part in halves(model):
        client.trainer.send(part)  # type: ignore[attr-defined]
    client.post("/finish_weight_update")
    client.post("/resume")


class Door(NamedTuple):
    """How a trainer serves.

    Attributes:
        alive: the route that its probe polls.
        generate: asks for a prompt's response of so many tokens.
        options: of the server, beside what PAT and the tests need.
    """

    alive: str
    generate: Callable[[Client, int, int], Answer]
    update: Callable[[Client, str], None]
    options: dict[str, Any]


HERE = "tests.nightly.trainers"
SKYRL = {
    "worker-cls": "vllm.v1.worker.cpu_worker.CPUWorker",  # it names CUDA's by itself
    "worker-extension-cls": f"{HERE}.skyrl_on_cpu.NewInferenceWorkerWrap",
    "weight-transfer-config": json.dumps({"backend": "skyrl_nccl"}),
}
# It takes no other than "mp" and "ray", and PAT is asked for by its option.
DOORS = {
    "prime_rl": Door("/liveness", completed, by_prime_rl, {}),
    **{
        f"skyrl{kind}": Door(
            "/health", generated, by_skyrl, SKYRL | {"distributed-executor-backend": backend}
        )
        for kind, backend in (("", "mp"), ("_ray", "ray"))
    },
}


@pytest.fixture(params=DOORS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Client, Door]]:
    with serving(request.param, tmp_path / "serve.log", OLD) as client:
        yield client, DOORS[request.param]


@contextmanager
def serving(name: str, log: Path, model: str, **options: Any) -> Iterator[Client]:
    """Inside, a trainer's server runs; `options` of it besides."""
    need(name.removesuffix("_ray"))
    server = Server(
        log,
        {
            "weights": "inplace",
            "enabled": True,
            "policy": POLICY,
        },
        program=("-m", f"{HERE}.{name}_server"),
        **{"model": random_model(model), "speculative-config": None, **DOORS[name].options},
        **options,
    )
    try:
        server.wait_until_ready()
        yield Client(server)
    finally:
        server.kill()


@contextmanager
def polled(client: Client, path: str) -> Iterator[list[str]]:
    """Inside, a probe polls the server, as Kubernetes does."""
    answers: list[str] = []
    over = threading.Event()

    def poll() -> None:
        while not over.wait(0.1):
            answers.append(client.server.get(path))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(poll)
        try:
            yield answers
        finally:
            over.set()
            done.result()


def expected(model: str) -> list[Outcome]:
    """What stock vLLM generates."""
    jobs = {str(i): Job(p, SAMPLING | {"max_tokens": LENGTHS[i]}) for i, p in enumerate(PROMPTS)}
    return list(stock_answers(model, jobs).values())


def switches(server: Server) -> int:
    return server.child.output.count("PAT switched tp1dp2 -> tp2dp1 (policy)")


def test_switches_probes_and_updates(served: tuple[Client, Door]) -> None:
    """Through switches, before and after new weights, which also come amid a switched response."""
    client, door = served
    server = client.server
    with polled(client, door.alive) as probed, ThreadPoolExecutor(len(PROMPTS)) as pool:
        for model in (OLD, NEW, OLD):
            before = switches(server)
            alone = pool.submit(door.generate, client, 0, LONG)
            while switches(server) == before:
                assert not alone.done(), alone.result()
                time.sleep(0.05)
            door.update(client, model)
            assert len(alone.result()[0]) == LONG
            before = switches(server)
            asked = [pool.submit(door.generate, client, i, n) for i, n in enumerate(LENGTHS)]
            for answer, wanted in zip(asked, expected(model), strict=True):
                token_ids, logprobs = answer.result()
                assert token_ids == wanted.token_ids
                assert logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
            assert switches(server) > before
    assert len(probed) > 6
    server.stop()  # by its own code, whose exit status differs
    _, left = psutil.wait_procs(server.family, timeout=PATIENCE)
    assert not left


def test_images_by_skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has images rendered, and posts what came of them with token ids."""
    need("skyrl")
    # It is for Python 3.12, from which on pydantic takes this one.
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

    def chunks(job: Job) -> Iterator[dict[str, Any]]:
        """Text and images in turn, as Tinker's prompts have them."""
        pictures = iter(data_of(job.media).get("image", []))
        _, place, _ = PLACE["image"]
        for token in job.prompt:
            if token == place:
                file = io.BytesIO()
                next(pictures).save(file, "png")
                data = base64.b64encode(file.getvalue()).decode()
                yield {"type": "image", "data": data, "format": "png"}
            else:
                yield {"type": "encoded_text", "tokens": [token]}

    async def sampled(url: str) -> list[tuple[list[int], list[float]]]:
        client = remote_inference_client.RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny"
        )
        asked = [
            client.sample(
                {
                    "json": {
                        "prompt": {"chunks": [*chunks(job)]},
                        "num_samples": 1,
                        "sampling_params": {"temperature": 0.0}
                        | {"max_tokens": job.sampling["max_tokens"]},
                    }
                }
            )
            for job in images.jobs().values()
        ]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            await client.teardown()
        sequences = [sequence for answer in answers for sequence in answer["sequences"]]
        return [(sequence["tokens"], sequence["logprobs"]) for sequence in sequences]

    options = {"mm-processor-cache-gb": 0}
    with serving("skyrl", tmp_path / "serve.log", images.OLD, **options) as client:
        for model in (images.OLD, images.NEW):
            if model != images.OLD:
                by_skyrl(client, model)
                client.post("/reset_prefix_cache")
            before = switches(client.server)
            answers = asyncio.run(sampled(client.server.url))
            for (token_ids, logprobs), wanted in zip(
                answers, images.expected(model).values(), strict=True
            ):
                # Its sampling parameters leave no way to go on after an end token.
                count = len(token_ids)
                assert token_ids == wanted.token_ids[:count]
                assert logprobs == pytest.approx(wanted.logprobs[:count], abs=TOLERANCE)
            assert sum(len(token_ids) for token_ids, _ in answers) > 40
            assert switches(client.server) > before
