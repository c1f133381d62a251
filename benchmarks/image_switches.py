"""Switches with live requests that hold images, against as many tokens of text.

    python -m benchmarks.image_switches
    python -m benchmarks.image_switches --v2

One engine of a tiny Qwen2.5-VL has batches of either kind in turn, and switches there and back
while they decode. A ratio is the median stall of images over that of text; the bar is `BAR`. With
`--v2`, Model Runner V2 runs by Triton's interpreter, which a switch hardly calls.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import tests.conftest  # noqa: F401  # the environment of engines on CPU
from benchmarks.engine_process import step_until
from benchmarks.record import Summary, machine, table, write_results

BAR = 1.1
LIVE = 8
SIDES = 40, 32
"""Tokens of an image, which is all of a prompt, in its width and height."""
TOKENS = SIDES[0] * SIDES[1]
STEPS_BETWEEN = 2


def main() -> None:
    """Command line."""
    from tests.support.engines import engine
    from tests.support.v2_on_cpu.v2_on_cpu import model_runner_v2

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--v2", action="store_true", help="with Model Runner V2")
    parser.add_argument("--repeats", type=int, default=6, help="batches of each kind")
    parser.add_argument("--switches", type=int, default=6, help="in a batch")
    args = parser.parse_args()
    facts = machine()
    pat = {"kv_transfer": "migrate", "weights": "inplace"}
    options: dict[str, Any] = {
        "language_model_only": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_processor_kwargs": {"size": {"shortest_edge": 28**2, "longest_edge": TOKENS * 28**2}},
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 256 << 20,
    }
    stalls: dict[str, list[float]] = {"images": [], "text": []}
    parts: dict[str, list[dict[str, float]]] = {"images": [], "text": []}
    with (
        model_runner_v2() if args.v2 else nullcontext(),
        engine("qwen2_5_vl", 2, pat, **options) as llm,
    ):
        for batch in range(-1, args.repeats):  # the first is a warm-up
            for kind in ("images", "text") if batch % 2 else ("text", "images"):
                reports = switches(llm, kind, batch, args.switches)
                if batch >= 0:
                    stalls[kind] += [report.seconds - report.quiesce for report in reports]
                    parts[kind] += [vars(report) for report in reports]
    found = {kind: Summary.of(seconds) for kind, seconds in stalls.items()}
    ratio = found["images"].median / found["text"].median
    rows = [
        [
            kind,
            found[kind].show(1e3, 2),
            *(
                f"{1e3 * Summary.of([each[part] for each in parts[kind]]).median:.2f}"
                for part in ("plan", "states", "kv", "weights", "activate", "finish")
            ),
        ]
        for kind in found
    ]
    head = ["requests", "stall", "plan", "states", "kv", "weights", "activate", "finish"]
    runner = "V2" if args.v2 else "V1"
    text = (
        f"{LIVE} requests of {TOKENS} tokens, Model Runner {runner}; ms, median (low-high).\n\n"
        f"{table(head, rows)}\nImages over text: {ratio:.3f}; bar {BAR}.\n"
    )
    write_results(f"image-switches-{runner.lower()}", facts, {"stalls": stalls}, text)


def switches(llm: Any, kind: str, batch: int, number: int) -> list[Any]:
    """Switch there and back while a batch decodes; the reports."""
    import pat_vllm
    from tests.support.engines import Job, add_job
    from tests.support.vision import PLACE

    assert llm.reset_prefix_cache()
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": STEPS_BETWEEN * number + 40}
    names = {f"{kind}-{batch}-{i}": 0 for i in range(LIVE)}
    for i, name in enumerate(names):
        seed = 1000 * batch + 100 * i
        job = Job([3 + (seed + j) % 300 for j in range(TOKENS + 2)], sampling)
        if kind == "images":
            width, height = (28 * side for side in SIDES)
            media = (("image", 10_000 + seed, width, height),)
            job = Job(PLACE["image"], sampling, media=media)
        add_job(llm, name, job)
    begun = len(pat_vllm.report(llm).switches)
    for i in range(number):
        step_until(llm, names, STEPS_BETWEEN * (i + 1))
        assert pat_vllm.switch(llm, tp=1 + (i + 1) % 2)
    step_until(llm, names, None)
    made = [s for s in pat_vllm.report(llm).switches[begun:] if s.reason == "forced"]
    assert all(switch.migrated == LIVE for switch in made), made
    return made


if __name__ == "__main__":
    main()
