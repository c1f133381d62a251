"""Real engines for tests: started once, driven step by step."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.support import fp8_on_cpu, vision
from tests.support.fork_server import start_from_server
from tests.support.latent_in_chunks import latent_in_chunks
from tests.support.models import LATENT, random_model
from tests.support.plain_weights import plain_weights

OPTIONS: dict[str, Any] = {
    # Strict equality between layouts is possible in float32 only.
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 << 20,
    # The smallest that vLLM's CPU attention takes: more blocks, more to go wrong.
    "block_size": 32,
    "seed": 7,
}


GATED_DELTA_NET = ("qwen3_next", "qwen3_5")
"""How names of models begin whose layers vLLM runs on CPU with packed weights only."""
REFERENCE_MLA = {"attention_backend": "CPU_MLA"}
"""On a CPU with AMX vLLM would take a backend that packs weights and is for 16 bits."""
FP8_WEIGHTS = "tests.support.fp8_updates.UpdatesByLayer"
PLAIN_WEIGHTS = "tests.support.weight_updates.WeightUpdates"


@contextlib.contextmanager
def engine(
    model: str,
    ranks: int,
    pat: Mapping[str, Any] | None,
    in_process: bool = True,
    from_server: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """A vLLM `LLM` over `ranks` ranks: with PAT and its options, or stock where `pat` is None.

    Args:
        in_process: keep vLLM's engine core in this process, so that it makes a step exactly when
            the test makes one; otherwise it runs freely in a process of its own, as for users.
        from_server: start its processes from a server, sooner than for users
            (`tests/support/fork_server.py`).
    """
    from vllm import LLM, envs

    # Another engine that lives in this process has vLLM keep the environment as it was.
    envs.disable_envs_cache()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    start_from_server(from_server)
    if pat is not None:
        # What a test does not ask for must not happen: the default would decide by itself. A batch
        # is over as soon as no request is left.
        policy = {"kind": "static", "tp": pat.get("base_tp", 1), "idle_seconds": 0}
        pat = {"policy": policy, **pat}
        options = {
            "distributed_executor_backend": "pat",
            **options,
            "additional_config": {"pat": pat},
        }
    let_vllm_look_at_numba()
    with contextlib.ExitStack() as inside:
        if model in vision.CLASSES:
            options = vision.TEXT_ONLY | options
        if model in LATENT:
            inside.enter_context(latent_in_chunks())
            options = REFERENCE_MLA | options
        if model.startswith("fp8"):
            inside.enter_context(fp8_on_cpu.applied())
            if options.get("worker_extension_cls", "tests.support").startswith("tests.support"):
                options = options | {"worker_extension_cls": FP8_WEIGHTS}
        in_place = (pat or {}).get("weights") == "inplace"
        if in_place and model.startswith(GATED_DELTA_NET):
            options = {"worker_extension_cls": PLAIN_WEIGHTS} | options
        inside.enter_context(_weights_as(options.get("worker_extension_cls", "")))
        inside.enter_context(_worker_without_extension())
        model = str(random_model(model))
        drafts = options.get("speculative_config") or {}
        if "model" in drafts:
            options = options | {
                "speculative_config": drafts | {"model": str(random_model(drafts["model"]))}
            }
        llm = LLM(model=model, tensor_parallel_size=ranks, **{**OPTIONS, **options})
        try:
            yield llm
            if pat is not None and in_process:
                _check_planning(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            envs.disable_envs_cache()


@contextlib.contextmanager
def _weights_as(extension: str) -> Iterator[None]:
    """Have engines of one rank, which load their model in this process, pack weights or keep them.

    Extensions that update weights keep them plain when they are imported, which is once.
    """
    import vllm.model_executor.layers.utils as utils

    stock = utils.dispatch_cpu_unquantized_gemm
    if extension.endswith((".WeightUpdates", ".UpdatesByLayer")):
        plain_weights.apply()
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = stock


@contextlib.contextmanager
def _worker_without_extension() -> Iterator[None]:
    """Have an engine of one rank leave vLLM's worker as it was.

    vLLM makes the extension a base of the class, and then refuses another with the same methods.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    bases = CPUWorker.__bases__
    try:
        yield
    finally:
        CPUWorker.__bases__ = bases


def let_vllm_look_at_numba() -> None:
    """Have an engine start in a process that has imported numba, as stock ones with drafts do.

    On CPU vLLM looks at the `__dict__` of all that is in any module, and one object of llvmlite's
    takes that for the name of a function of its library.
    """
    ffi: Any = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    look_up = ffi._lib_wrapper.__getattr__
    if look_up.__module__ == __name__:
        return

    def look_up_functions(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return look_up(library, name)

    ffi._lib_wrapper.__getattr__ = look_up_functions


def _check_planning(llm: Any) -> None:
    """A mistake in planning is undone and told: a test that passes would not show it."""
    refused = scheduler_of(llm).controller.report().refused
    mistakes = [refusal.why for refusal in refused if not refusal.expected]
    assert not mistakes, mistakes


def engine_processes(before: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Descendants of this process that an engine consists of, but for what was there `before`."""
    others = {process.pid for process in before}
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in others and not _belongs_to_no_engine(process)
    ]


def _belongs_to_no_engine(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    # Ray starts workers in advance, and names them when they are ready.
    servers = (
        "resource_tracker",
        "multiprocessing.forkserver",
        "ray::IDLE",
        "default_worker.py",
    )
    return any(server in command for server in servers)


@dataclass
class Job:
    """One request: prompt token ids and `SamplingParams` fields."""

    prompt: list[int]
    sampling: dict[str, Any]
    arrives: int = 0
    """Engine step before which `run` adds it."""
    priority: int = 0
    media: tuple[tuple[str, int, int, int], ...] = ()
    """Kind ("image" or "video"), seed, width and height in pixels of each one, for whose tokens the
    prompt has `tests.support.vision.PLACE`."""


@dataclass
class Outcome:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of the prompt's tokens from the second on, if the request asks for them."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt whose KV was found in a prefix cache."""

    def take(self, output: Any, piece: bool) -> None:
        """Take an output of the engine: all that there is, or the next piece of it."""
        completion = output.outputs[0]
        if not piece:
            self.token_ids, self.logprobs, self.text = [], [], ""
        self.token_ids += completion.token_ids
        self.logprobs += _logprobs_of(completion.logprobs or [], completion.token_ids)
        self.text += completion.text
        self.finish_reason = completion.finish_reason
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            tokens = output.prompt_token_ids[1:]
            self.prompt_logprobs = _logprobs_of(output.prompt_logprobs[1:], tokens)


def _logprobs_of(entries: Iterable[Any], tokens: Iterable[int]) -> list[float]:
    """The log-probability of each token; minus infinity where vLLM names none."""
    pairs = zip(entries, tokens, strict=False)
    return [entry[token].logprob if token in entry else -math.inf for entry, token in pairs]


def add_job(llm: Any, name: str, job: Job) -> None:
    """Add a job to the engine; `run` sees its outputs, also of one that it was not given."""
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": job.prompt}
    params = SamplingParams(**job.sampling)
    if job.media:
        prompt["multi_modal_data"] = vision.data_of(job.media)
    llm.llm_engine.add_request(name, prompt, params, priority=job.priority)


def run(
    llm: Any,
    jobs: Mapping[str, Job],
    before_step: Callable[[int], None] = lambda step: None,
    seen: dict[str, Outcome] | None = None,
) -> dict[str, Outcome]:
    """Run jobs step by step, calling `before_step(i)` before arrivals and engine step number i.

    Args:
        seen: gets what has come so far for each job, also for those that do not finish. Jobs whose
            `output_kind` is DELTA hand it out piece by piece.

    Returns:
        Outcomes of the jobs that finished, by request id.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    seen = {} if seen is None else seen
    delta = RequestOutputKind.DELTA
    streamed = {name for name, job in jobs.items() if job.sampling.get("output_kind") == delta}
    waiting = dict(jobs)
    step = 0
    while waiting or engine.has_unfinished_requests():
        before_step(step)
        for name in [name for name, job in waiting.items() if job.arrives <= step]:
            add_job(llm, name, waiting.pop(name))
        for output in engine.step():
            piece = output.request_id in streamed
            if piece or output.finished:
                seen.setdefault(output.request_id, Outcome()).take(output, piece)
        step += 1
        assert step < 20_000, "the engine makes no progress"
    return {name: outcome for name, outcome in seen.items() if outcome.finish_reason is not None}


def teacher_forced(llm: Any, sequences: Mapping[str, tuple[list[int], list[int]]]) -> Any:
    """Log-probabilities that the engine, as it is laid out now, gives to given tokens.

    Args:
        sequences: name -> (prompt token ids, generated token ids).

    Returns:
        name -> log-probability of each generated token, by prompt logprobs of the whole sequence.
    """
    from vllm import SamplingParams

    names = list(sequences)
    prompts = [{"prompt_token_ids": [*a, *b]} for a, b in sequences.values()]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), use_tqdm=False
    )
    scores = {}
    for name, output in zip(names, outputs, strict=True):
        prompt, generated = sequences[name]
        entries = output.prompt_logprobs[len(prompt) :]
        scores[name] = [e[t].logprob for e, t in zip(entries, generated, strict=True)]
    return scores


def scheduler_of(llm: Any) -> Any:
    """The `PATScheduler` of an engine whose core is in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler
