# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in what a bare machine with one GPU gets, runs and replaces."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

UNIT = "tests/unit/benchmarks/test_bare.py"
RANKS = "tests/vllm/benchmarks/test_bare.py::test_collectives_of_ranks_that_share_a_gpu"
PROGRAMS = "tests/vllm/benchmarks/test_bare.py::test_programs_of_the_steps_take_their_arguments"
CONTRACT = "tests/vllm/contract/test_vllm_contract.py::test_ranks_can_share_a_gpu"

# fmt: off
_ROWS = [
    ("16-bit floats are summed as such", "one_gpu:on_host", "torch.float32 if narrow else tensor.dtype", "tensor.dtype", RANKS),
    ("gloo gets inference tensors", "one_gpu:on_host", "torch.inference_mode(False)", "torch.inference_mode(True)", RANKS),
    ("results stay on the host", "one_gpu:_through_host", "result.copy_(hosts[tensors[0]])", "pass", RANKS),
    ("tensors on CPU are copied, too", "one_gpu:on_gpu", "tensor.is_cuda", "True", RANKS),
    ("callers that wait get nothing to wait for", "one_gpu:_through_host", 'work if given.get("async_op") else None', "None", RANKS),
    ("each rank has a device of its own", "one_gpu:_of_first_device", "stock(cls, 0)", "stock(cls, device_id)", RANKS),
    ("the first GPU, whichever are visible", "one_gpu:_of_first_device", "stock(cls, 0)", "0", RANKS),
    ("the doctor counts one GPU", "one_gpu:_of_a_device_for_each_rank", "facts.devices[:1] * RANKS", "facts.devices", RANKS),
    ("class methods become functions", "one_gpu:apply", "classmethod(made) if of_class else made", "made", RANKS),
    ("vLLM's environment is left as it was", "one_gpu:install", "os.environ.update(ENVIRONMENT)", "pass", RANKS),
    ("what is left out travels", "pack:contents", "any(fnmatch.fnmatch(path, one) for one in left_out)", "False", UNIT),
    ("pieces of an older archive stay", "pack:pack", "old.unlink()", "pass", UNIT),
    ("damaged pieces are unpacked", "receive:receive", "if damaged:", "if False:", UNIT),
    ("files of an older archive stay", "receive:receive", "shutil.rmtree(site, ignore_errors=True)", "pass", UNIT),
    ("a step calls an option that is gone", "run:commands", "--tensor-parallel-size 1", "--tensor-parallel 1", UNIT),
    ("a step calls a program with another option", "run:commands", '"--out", str(out)', '"--output", str(out)', PROGRAMS),
    ("the steps after one that failed are not run", "run:main", "not all([run(step, arguments, ranks) for step, *arguments in steps])", "not all(run(step, arguments, ranks) for step, *arguments in steps)", UNIT),
]
# fmt: on

MUTATIONS = [
    Mutation(name, f"benchmarks.gpu.bare.{function}", {old: new}, (tests,))
    for name, function, old, new, tests in _ROWS
]
MUTATIONS.append(
    Mutation(
        "what is replaced may be gone",
        "tests.vllm.contract.behaviour:_names",
        {'getattr(node, "name", "")': '"nothing"'},
        (CONTRACT,),
    )
)
