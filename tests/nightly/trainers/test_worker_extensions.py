"""Worker extensions of trainers, by their own methods: new weights reach each layout."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from torch.distributed import broadcast
from vllm import SamplingParams
from vllm.utils.network_utils import get_open_port

import pat_vllm
from tests.engine.test_ray import cluster  # noqa: F401
from tests.engine.test_weight_updates import halves
from tests.nightly.trainers import images, need
from tests.support.engines import Job, Outcome, engine, run, scheduler_of
from tests.support.models import random_model
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.stock import stock_answers
from tests.support.vision import data_of
from tests.support.weight_transfer import Sockets, trainer_of

OLD, NEW = "qwen3", "qwen3_updated"


def batch() -> dict[str, Job]:
    rng = random.Random(0)
    sampling = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    return {
        f"r{i}": Job([rng.randrange(3, 400) for _ in range(20)], sampling | {"max_tokens": 6 + i})
        for i in range(4)
    }


def by_prime_rl(llm: Any, model: str) -> None:
    """As prime-rl's server does: generation is paused, and goes on with the KV that it has."""
    core = llm.llm_engine.engine_core.engine_core
    version = scheduler_of(llm).replica_set.executor.weights_version
    llm.collective_rpc("liveness_probe")
    assert scheduler_of(llm).replica_set.executor.weights_version == version, "it only reads"
    core.pause_scheduler("keep", clear_cache=False)
    llm.collective_rpc("update_weights_from_path", args=(str(random_model(model)),))
    core.resume_scheduler()


def by_skyrl(llm: Any, model: str, drafter: str = "") -> None:
    """SkyRL's control plane makes these calls by vLLM's routes.

    Args:
        drafter: the model whose MTP module it sends after that, with embeddings and head.
    """
    core = llm.llm_engine.engine_core.engine_core
    trainer = trainer_of(llm)
    core.pause_scheduler("keep", clear_cache=False)
    llm.start_weight_update()
    for part in halves(model):
        trainer.send(part)
    llm.finish_weight_update()
    if drafter:
        llm.start_draft_weight_update()
        for part in halves(drafter):
            trainer.send([weight for weight in part if OF_MTP.search(weight[0])])
        llm.finish_weight_update()
    core.resume_scheduler()


OF_MTP = re.compile("mtp|embed_tokens|lm_head")


def by_nemo_rl(llm: Any, model: str, drafter: str = "") -> None:
    """As NeMo-RL's generation worker does, with its collective: all weights in one call.

    Args:
        drafter: whose weights go with them, by names of their own.
    """
    weights = [weight for half in halves(model) for weight in half]
    if drafter:
        weights += [(f"draft.{name}", w) for half in halves(drafter) for name, w in half]
    if not hasattr(llm, "group"):
        port = get_open_port()
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(Sockets, "127.0.0.1", port, 0, 3, None)
            llm.collective_rpc("init_collective", args=(0, "127.0.0.1", port, 3, 1))
            llm.group = joined.result()
    info = {name: (weight.shape, weight.dtype) for name, weight in weights}
    llm.collective_rpc("prepare_refit_info", args=(info,))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [llm.group.broadcast(weight, 0) for _, weight in weights])
        assert llm.collective_rpc("update_weights_from_collective") == [True, True]
        sent.result()


def by_areal_files(llm: Any, model: str) -> None:
    """As AReaL's server does, which aborts what runs. This one has nothing in flight."""
    path = str(random_model(model))
    assert all(ok for ok, _ in llm.collective_rpc("areal_update_weights", args=(path,)))


def by_areal_xccl(llm: Any, model: str) -> None:
    """As AReaL's trainer does, with its own group; on CPU by gloo. A call for each half."""
    from areal.engine.core.distributed import init_custom_process_group

    def call(method: str, *args: Any) -> None:
        assert all(ok for ok, _ in llm.collective_rpc(method, args=args))

    name = "update_weight_group"
    with ThreadPoolExecutor(1) as pool:
        if not hasattr(llm, "group"):
            host, port = "127.0.0.1", get_open_port()
            options = {"init_method": f"tcp://{host}:{port}", "world_size": 3, "rank": 0}
            join = partial(init_custom_process_group, "gloo", group_name=name, **options)
            joined = pool.submit(join)
            call("areal_init_update_weight_group", host, str(port), 1, 3, "gloo", name)
            llm.group = joined.result()
        for half in halves(model):
            names, weights = zip(*half, strict=True)
            dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights]
            call("areal_set_weight_meta", names, dtypes, [[*w.shape] for w in weights], name)
            sent = pool.submit(lambda ws: [broadcast(w, 0, llm.group) for w in ws], weights)
            call("areal_update_weight_xccl")
            sent.result()


HERE = "tests.nightly.trainers"
AREAL = "areal.engine.vllm_ext.vllm_worker_extension.VLLMWorkerExtension"
EXTENSIONS: dict[str, tuple[str, Callable[[Any, str], None], dict[str, Any]]] = {
    "prime_rl": (f"{HERE}.prime_rl_on_cpu.FileSystemWeightUpdateWorker", by_prime_rl, {}),
    **{
        f"skyrl {transfer}": (
            f"{HERE}.skyrl_on_cpu.NewInferenceWorkerWrap",
            by_skyrl,
            {
                "weight_transfer_config": {"backend": f"skyrl_{transfer}"},
                # It takes no other, and PAT is asked for by its option.
                "distributed_executor_backend": "mp",
            },
        )
        for transfer in ("nccl", "ipc")
    },
    "nemo_rl": (f"{HERE}.nemo_rl_on_cpu.Extension", by_nemo_rl, {}),
    "areal files": (AREAL, by_areal_files, {}),
    "areal xccl": (AREAL, by_areal_xccl, {}),
}


@pytest.fixture(params=EXTENSIONS)
def trainer(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[[Any, str], None]]]:
    """An engine with a trainer's extension, and how that trainer updates it."""
    extension, update, options = EXTENSIONS[request.param]
    package = request.param.partition(" ")[0]
    need(package)
    options = {"worker_extension_cls": extension, **options}
    pat = {"weights": "inplace", "enabled": True}
    if package == "nemo_rl":  # which also says what its engines are started with: Ray
        from tests.nightly.trainers.nemo_rl_on_cpu import engine_options

        request.getfixturevalue("cluster")
        options = engine_options(str(random_model(OLD)), 2, pat)
    with engine(OLD, 2, pat, **options) as llm:
        yield llm, update


def test_new_weights_reach_every_layout(trainer: Any) -> None:
    llm, update = trainer
    layouts = [layout.tp for layout in pat_vllm.report(llm).layouts]
    for model in (NEW, OLD, NEW):
        for layout in layouts:
            pat_vllm.switch(llm, tp=layout)
            update(llm, model)
            llm.reset_prefix_cache()
            for name in layouts:
                pat_vllm.switch(llm, tp=name)
                assert_same(run(llm, batch()), stock_answers(model, batch()), PLAIN_TOLERANCE)
            model = OLD if model == NEW else NEW


def test_images_by_nemo_rl(cluster: Any) -> None:  # noqa: F811
    """Prompts as it writes them for its first turn and for later ones, with switches between."""
    need("nemo_rl")
    from tests.nightly.trainers.nemo_rl_on_cpu import engine_options, prompts_of

    policy = {"kind": "schedule", "switch_at": {"3": 2}}
    pat = {"weights": "inplace", "enabled": True, "policy": policy, "kv_transfer": "migrate"}
    options = engine_options(str(random_model(images.OLD)), 2, pat, language_model_only=False)
    jobs = images.jobs()
    params = [SamplingParams(**job.sampling) for job in jobs.values()]
    with engine(images.OLD, 2, pat, **options) as llm:
        tokenizer = llm.get_tokenizer()
        text = tokenizer.decode(jobs["one"].prompt)
        assert tokenizer.encode(text) == jobs["one"].prompt
        prompts = prompts_of(
            [(job.prompt, data_of(job.media).get("image", [])) for job in jobs.values()],
            [text, *[None] * (len(jobs) - 1)],
        )
        for model in (images.OLD, images.NEW):
            if model != images.OLD:
                by_nemo_rl(llm, model)
                llm.reset_prefix_cache()
            before = len(pat_vllm.report(llm).switches)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            outcomes = {name: Outcome() for name in jobs}
            for outcome, output in zip(outcomes.values(), outputs, strict=True):
                outcome.take(output, piece=False)
            assert_same(outcomes, images.expected(model), PLAIN_TOLERANCE)
            made = pat_vllm.report(llm).switches[before:]
            assert any(switch.migrated for switch in made), made


def old_by_nemo_rl(llm: Any, jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    by_nemo_rl(llm, "fp8")
    return run(llm, jobs)


def new_by_nemo_rl(llm: Any, jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    by_nemo_rl(llm, "fp8_updated")
    return run(llm, jobs)


def test_nemo_rl_quantizes(cluster: Any) -> None:  # noqa: F811
    """With `precision=fp8`, as in stock vLLM; its experts do not run there either."""
    need("nemo_rl")
    from tests.nightly.trainers.nemo_rl_on_cpu import engine_options

    pat = {"weights": "inplace", "enabled": True}
    options = engine_options(str(random_model("fp8")), 2, pat, "fp8")
    options |= {
        "dtype": "float32",  # in which layouts differ by rounding alone
        "worker_extension_cls": f"{HERE}.nemo_rl_fp8_on_cpu.Extension",
    }
    static = options | {"additional_config": {}, "distributed_executor_backend": "mp"}
    ways = {"fp8_updated": new_by_nemo_rl, "fp8": old_by_nemo_rl}
    expected = {
        model: stock_answers("fp8", batch(), ranks=2, how=how, **static)
        for model, how in ways.items()
    }
    assert expected["fp8"] != expected["fp8_updated"]
    with engine("fp8", 2, pat, **options) as llm:
        layouts = [layout.tp for layout in pat_vllm.report(llm).layouts]
        for layout, model in zip(layouts, ways, strict=True):
            pat_vllm.switch(llm, tp=layout)
            by_nemo_rl(llm, model)
            llm.reset_prefix_cache()
            for name in layouts:
                pat_vllm.switch(llm, tp=name)
                assert_same(run(llm, batch()), expected[model], PLAIN_TOLERANCE)
