# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in what a bare machine with one GPU gets, runs and replaces."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/benchmarks/test_bare.py::test_collectives_of_ranks_that_share_a_gpu": [
        ("16-bit floats are summed as such", "benchmarks.gpu.bare.one_gpu:on_host", "torch.float32 if narrow else tensor.dtype", "tensor.dtype"),
        ("gloo gets inference tensors", "benchmarks.gpu.bare.one_gpu:on_host", "torch.inference_mode(False)", "torch.inference_mode(True)"),
        ("results stay on the host", "benchmarks.gpu.bare.one_gpu:_through_host", "result.copy_(hosts[tensors[0]])", "pass"),
        ("tensors on CPU are copied, too", "benchmarks.gpu.bare.one_gpu:on_gpu", "tensor.is_cuda", "True"),
        ("callers that wait get nothing to wait for", "benchmarks.gpu.bare.one_gpu:_through_host", 'work if given.get("async_op") else None', "None"),
        ("each rank has a device of its own", "benchmarks.gpu.bare.one_gpu:_of_first_device", "stock(cls, 0)", "stock(cls, device_id)"),
        ("the first GPU, whichever are visible", "benchmarks.gpu.bare.one_gpu:_of_first_device", "stock(cls, 0)", "0"),
        ("the doctor counts one GPU", "benchmarks.gpu.bare.one_gpu:_of_a_device_for_each_rank", "facts.devices[:1] * RANKS", "facts.devices"),
        ("work is on the default stream", "benchmarks.gpu.bare.one_gpu:_on_a_stream_of_its_own", "torch_utils.current_stream()", "pass"),
        ("class methods become functions", "benchmarks.gpu.bare.one_gpu:apply", "classmethod(changed) if of_class else changed", "changed"),
        ("FlashInfer is taken where it is not whole", "benchmarks.gpu.bare.one_gpu:_without_flashinfer", 'find_spec("flashinfer") and find_spec("cutlass")', 'find_spec("flashinfer")'),
        ("vLLM's environment is left as it was", "benchmarks.gpu.bare.one_gpu:install", "os.environ.update(ENVIRONMENT)", "pass"),
    ],
    "tests/unit/benchmarks/test_bare.py": [
        ("what is left out travels", "benchmarks.gpu.bare.pack:contents", "fnmatch.fnmatch(path, pattern) for pattern in left_out", "False for pattern in left_out"),
        ("pieces of an older archive stay", "benchmarks.gpu.bare.pack:pack", "old.unlink()", "pass"),
        ("damaged pieces are unpacked", "benchmarks.gpu.bare.receive:receive", "if damaged:", "if False:"),
        ("files of an older archive stay", "benchmarks.gpu.bare.receive:receive", "shutil.rmtree(site, ignore_errors=True)", "pass"),
        ("a step calls an option that is gone", "benchmarks.gpu.bare.run:commands", "--tensor-parallel-size 1", "--tensor-parallel 1"),
        ("the steps after one that failed are not run", "benchmarks.gpu.bare.run:run_all", "all([run(*step) for step in chain])", "all(run(*step) for step in chain)"),
        ("steps end with their command", "benchmarks.gpu.bare.run:main", '"start_new_session": True, "pass_fds": [free.fileno()]', '"start_new_session": True'),
        ("a failure before is told again", "benchmarks.gpu.bare.run:main", "journal_so_far[seen:]", "journal_so_far"),
        ("a second --engine replaces the step's", "benchmarks.gpu.bare.run:commands", "{**small, **eager, **given.engine}", "given.engine"),
        ("a mixture without kernels is begun", "benchmarks.gpu.bare.run:run_all", "check_shape(arguments, SITE)", "pass"),
    ],
    "tests/vllm/benchmarks/test_bare.py::test_programs_of_the_steps_take_their_arguments": [
        ("a step calls a program with another option", "benchmarks.gpu.bare.run:commands", '"--out", str(out)', '"--output", str(out)'),
    ],
    "tests/vllm/kv_transfer/test_exchange.py::test_a_rank_alone_exchanges_with_itself": [
        ("layers come in another order", "kv_transfer.exchange:CollectiveTransport.finish", "self._under_way[0]", "self._under_way[-1]"),
    ],
    "tests/vllm/contract/test_vllm_contract.py::test_ranks_can_share_a_gpu": [
        ("what is replaced may be gone", "tests.vllm.contract.behaviour:_names", 'getattr(node, "name", "")', '"nothing"'),
    ],
})
# fmt: on
