"""`vllm serve` as users start it; what it does is in `tests/engine/test_serve.py`."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.fork_server import Program
from tests.support.fp8_on_cpu import PACKING, has_fp8_kv
from tests.support.models import random_model
from tests.support.serve import PATIENCE, Server
from tests.support.vision import data_of

MIGRATE = {"policy": {"kind": "static", "tp": 1}, "kv_transfer": "migrate"}


def test_vllm_serve_starts_as_for_users(tmp_path: Path) -> None:
    policy = {"kind": "schedule", "switch_at": {"2": 2}}
    server = Server(tmp_path / "serve.log", {"policy": policy})
    try:
        server.wait_until_ready()
        assert [tokens for _, tokens in server.complete([60, 120, 180], stream=True)] == [
            *(60, 120, 180)
        ]
        assert "PAT switched tp1dp2 -> tp2dp1 (policy)" in server.child.output
        assert len(server.family) == 4  # front end, engine core, two workers
        assert server.stop() == 0
        _, left = psutil.wait_procs(server.family, timeout=PATIENCE)
        assert not left
    finally:
        server.kill()


@pytest.mark.parametrize("model", ["gemma3", "gpt_oss", "mistral"])
def test_models_with_windows(model: str, tmp_path: Path) -> None:
    """Answers are longer than the window."""
    check_through_switches(
        Server(tmp_path / "serve.log", MIGRATE, Program, model=random_model(model))
    )


def test_text_of_a_class_for_images(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": random_model("qwen2_5_vl"), "language-model-only": True}
    check_through_switches(Server(tmp_path / "serve.log", MIGRATE, **options))


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_chats_about_images(model: str, tmp_path: Path) -> None:
    server = Server(tmp_path / "serve.log", MIGRATE, Program, model=random_model(model))
    check_through_switches(server, described)


def described(server: Server, lengths: list[int]) -> list[tuple[str, int]]:
    """A chat about an image for each length, all at once: text and number of tokens."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE)

    def chat(index: int, tokens: int) -> tuple[str, int]:
        (picture,) = data_of([("image", index, 128, 96 + 64 * (index // 2))])["image"]
        file = io.BytesIO()
        picture.save(file, "png")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
            max_tokens=tokens,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return f"{answer.choices[0].message.content}", answer.usage.completion_tokens

    with client, ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(chat, range(len(lengths)), lengths))
    assert len({text for text, _ in answers}) == len(lengths)
    return answers


def test_weights_and_kv_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts round differently, so that answers may differ from one that no switch was made in."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", ",".join(PACKING))
    options = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
    if has_fp8_kv():
        options["kv-cache-dtype"] = "fp8_e5m2"
    server = Server(tmp_path / "serve.log", MIGRATE, Program, **options)
    check_through_switches(server, same_text=False)


def completed(server: Server, lengths: list[int]) -> list[tuple[str, int]]:
    return server.complete(lengths, stream=False)


def check_through_switches(
    server: Server,
    ask: Callable[[Server, list[int]], list[tuple[str, int]]] = completed,
    same_text: bool = True,
) -> None:
    """Greedy answers are the same, and all there, through switches under load."""
    lengths = [200] * 4
    try:
        server.wait_until_ready()
        quiet = ask(server, lengths)
        with ThreadPoolExecutor() as pool:
            answers = pool.submit(ask, server, lengths)
            tp = 2
            while not answers.done():
                server.switch(tp)
                tp = 3 - tp
            assert [tokens for _, tokens in answers.result()] == lengths
            assert not same_text or answers.result() == quiet
        assert sum(switch.migrated for switch in server.report().switches) >= len(lengths)
        assert server.stop() == 0
    finally:
        server.kill()


def test_a_killed_worker_ends_all_waits_and_the_server(tmp_path: Path) -> None:
    """In a storm of completions, switches, draft lengths and reports over HTTP."""
    server = Server(tmp_path / "serve.log", {"policy": {"kind": "static", "tp": 1}}, popen=Program)

    def switch() -> None:
        for tp in (2, 1):
            server.switch(tp)

    def again_and_again(call: Callable[[], Any]) -> None:
        while True:
            call()

    try:
        server.wait_until_ready()
        worker = next(
            process for process in server.family if "Worker_TP1" in "".join(process.cmdline())
        )
        with ThreadPoolExecutor() as pool:
            calls: list[Future[None]] = [
                pool.submit(again_and_again, call)
                for call in (
                    lambda: server.complete([60] * 8, stream=False),
                    switch,
                    lambda: server.rpc("pat_speculate", 4),
                    server.report,
                )
            ]
            for _ in range(3):
                server.complete([40], stream=True)
            os.kill(worker.pid, signal.SIGKILL)
            for future in calls:
                with pytest.raises((OSError, HTTPException, openai.OpenAIError)):
                    future.result(PATIENCE)
        _, left = psutil.wait_procs(server.family, timeout=PATIENCE)
        assert not left
    finally:
        server.kill()
