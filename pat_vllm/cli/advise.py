"""`pat-vllm advise`: whether PAT would pay for given rollouts, before anything is installed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pat_vllm.advice.lengths import EarlierRollouts, read_rollouts
from pat_vllm.advice.settings import settings
from pat_vllm.advice.sides import Rollouts, Task, replay, with_room
from pat_vllm.advice.text import PARTS, heading, percents, rows, verdict
from pat_vllm.advice.verdict import Advice, advise
from pat_vllm.cli.results import to_json
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import cut, read_json_object, read_text, shown
from pat_vllm.files.writing import write_whole
from pat_vllm.gpus import GPUS, gpu_named
from pat_vllm.memory.buffers import EngineShape
from pat_vllm.model_size import MODEL_SHAPES
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.choice import Load, choose
from pat_vllm.simulator.modelled.hardware import NODE_SIZE, config_file, modelled_profile
from pat_vllm.simulator.run import SimulatedReport
from pat_vllm.simulator.traces import GENERATORS, MOST_TOKENS, LengthTrace
from pat_vllm.simulator.tuned import DRAFT_LENGTHS
from pat_vllm.text_only import starting_with_safe_path

_CHAINS = 2
"""Rows of batches in which PAT learns anew; of two processes each takes one."""
_USUAL_MAX_TOKENS = 16384
_ITERATIONS, _ITERATIONS_WITH_DRAFTS = 8, 6
"""By default. Those with drafts take longer to replay."""

_ALLOWED: Mapping[str, tuple[float, float, str]] = {
    "gpus": (
        2,
        NODE_SIZE,
        "an engine is on one node; for several nodes, ask about one and its share of the responses",
    ),
    "responses": (2, 1_000_000, "all samples of all prompts of an iteration, on these GPUs"),
    "max_tokens": (1, MOST_TOKENS, "tokens of the longest response"),
    "acceptance": (0, 1, "share of the first draft tokens that is accepted; 0 is without drafts"),
    "drafting": (0, 60, "seconds that the drafter adds to a step"),
    "max_num_seqs": (1, 65536, "requests that a GPU runs at once, as in vLLM"),
    "iterations": (2, 10_000, "an interval needs two"),
    "seed": (0, 2**63 - 1, "a whole number"),
}
"""Least, most, and what an option means."""


@dataclass(frozen=True)
class Question:
    """The options of the command.

    Attributes:
        model: named, a checkpoint's directory or its config.json; None: the profile's.
        gpu: a modelled one; None with `profile`.
        gpus: of the engine.
        profile: of an engine, measured or modelled; None with `gpu`.
        responses: of an iteration.
        lengths: earlier rollouts; None: `shape`.
        shape: of the simulator's workloads.
        max_tokens: longest response; None: the longest in `lengths`, or 16384.
        acceptance: probability that a draft token is accepted if those before it were.
        drafting: seconds that the drafter adds to a step, modelled.
        max_num_seqs: of a GPU, modelled.
        iterations: that are replayed; None: as many as take some seconds.

    Raises:
        ValueError: a number is out of its range.
    """

    model: str | None = None
    gpu: str | None = None
    gpus: int = 8
    profile: Path | None = None
    responses: int = 1024
    lengths: Path | None = None
    shape: str = "deepscaler"
    max_tokens: int | None = None
    acceptance: float = 0.0
    drafting: float = 0.0
    max_num_seqs: int = 256
    iterations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (least, most, advice) in _ALLOWED.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                option = name.replace("_", "-")
                raise ValueError(
                    f"--{option} is {shown(value)}; allowed is {least} to {most}: {advice}"
                )

    def engine(self) -> Profile:
        """The profile that is given, or a modelled one of static engines.

        Raises:
            ValueError: an option is wrong or missing.
        """
        if self.profile is not None:
            if self.gpu is not None:
                raise ValueError("--gpu and --profile exclude each other; leave one out")
            profile = Profile.load(self.profile)
            if self.acceptance and not any(s.k for s in profile.steps):
                raise ValueError(
                    f"--acceptance is {self.acceptance:g}, but --profile {self.profile} has no "
                    "steps with drafts; take it from an engine with speculative_config, or leave "
                    "--acceptance out"
                )
            return profile
        if self.gpu is None or self.model is None:
            missing = "--gpu" if self.gpu is None else "--model"
            raise ValueError(
                f"{missing} is missing; name a modelled GPU (--gpu H100) and a model (--model "
                "DIRECTORY), or an engine's profile (--profile FILE, by `pat-vllm profile`)"
            )
        return self._modelled(static=True)

    def _modelled(self, **options: Any) -> Profile:
        assert self.model is not None and self.gpu is not None
        return modelled_profile(
            self.model,
            self.gpu,
            self.gpus,
            draft_lengths=DRAFT_LENGTHS[1:] if self.acceptance else (),
            drafting=self.drafting,
            max_num_seqs=self.max_num_seqs,
            **options,
        )

    def rollouts(self) -> Rollouts:
        """What is to be replayed.

        Raises:
            ValueError: an option or a file is wrong, or cannot be read.
        """
        engine = self.engine()
        earlier = None
        if self.lengths is not None:
            earlier = read_rollouts(self.lengths, self._count_tokens())
        elif self.shape not in GENERATORS:
            raise ValueError(f"--shape is {shown(self.shape)}; allowed are {', '.join(GENERATORS)}")
        count = self.iterations or (_ITERATIONS_WITH_DRAFTS if self.acceptance else _ITERATIONS)
        batches = [self._batch(earlier, self.seed + i) for i in range(count + _CHAINS)]
        # As vLLM's max_model_len, which a replica's memory has to hold.
        longest = max(max(one.num_prompt_tokens) + one.max_tokens for one in batches)
        if engine.kind == "modelled":
            engine = with_room(engine, longest)
        if len(engine.layouts) < 2:
            raise ValueError(
                f"{engine.title} has no layout but tp={engine.layouts[0].tp} with memory for "
                f"{longest:,} tokens; name more GPUs of a node (--gpus 2 to {NODE_SIZE}), or "
                "shorter responses (--max-tokens)"
            )
        rows = tuple(tuple(batches[i::_CHAINS]) for i in range(_CHAINS))
        if self.profile is not None:
            return Rollouts(engine, rows)
        return self._modelled_rollouts(engine, rows, longest)

    def _modelled_rollouts(
        self, alone: Profile, rows: tuple[tuple[LengthTrace, ...], ...], longest: int
    ) -> Rollouts:
        """With the layouts that an engine would choose for such iterations."""
        assert self.model is not None and self.gpu is not None
        first = rows[0][0]
        shape = EngineShape(
            (),
            max_num_seqs=self.max_num_seqs,
            max_model_len=longest,
            num_speculative_tokens=max(DRAFT_LENGTHS) if self.acceptance else 0,
        )
        path = config_file(self.model)
        choice = choose(
            read_json_object(path, "model config") if path else MODEL_SHAPES[self.model],
            PATConfig(),
            shape,
            self.gpus,
            GPUS[gpu_named(self.gpu)].device,
            load=Load(self.responses, first.lengths),
        )
        sizes = dict.fromkeys(layout.tp for layout in choice.layouts)
        engine = with_room(self._modelled(layouts=sizes, experts=choice.experts), longest)
        if engine.layouts != choice.layouts or len(sizes) < 2:
            raise ValueError(
                f"no layout of {alone.title} leaves memory for {longest:,} tokens to wider ones; "
                "name more GPUs of a node, or shorter responses (--max-tokens)"
            )
        return Rollouts(engine, rows, alone)

    def _batch(self, earlier: EarlierRollouts | None, seed: int) -> LengthTrace:
        if earlier is not None:
            batch = earlier.draw(self.responses, self.max_tokens or max(earlier.lengths), seed)
        else:
            most = self.max_tokens or _USUAL_MAX_TOKENS
            batch = GENERATORS[self.shape](self.responses, most, seed)
        return replace(batch, acceptance=self.acceptance)

    def _count_tokens(self) -> Any:
        """Counts by the checkpoint's tokenizer; None where there is none."""
        config = config_file(self.model) if self.model else None
        file = config.with_name("tokenizer.json") if config else None
        if file is None or not file.is_file():
            return None

        def count(texts: list[str]) -> list[int]:
            try:
                from tokenizers import Tokenizer
            except ImportError:
                raise ValueError(
                    f"--lengths {self.lengths} holds text, which the package `tokenizers` counts; "
                    "`pip install tokenizers`, or give the lengths in tokens"
                ) from None
            try:
                tokenizer = Tokenizer.from_str(read_text(file, "tokenizer"))
            except Exception as error:  # the package raises nothing more special
                raise ValueError(f"tokenizer {file} cannot be read: {cut(str(error))}") from None
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [len(one.ids) for one in encoded]

        return count


def answer(question: Question, processes: int = 1) -> Advice:
    """Replay what is asked about.

    Args:
        processes: among which the work is spread.

    Raises:
        ValueError: an option or a file is wrong, or cannot be read.
    """
    rollouts = question.rollouts()
    with ExitStack() as stack:
        run = None
        if processes > 1:
            stack.enter_context(starting_with_safe_path())
            pool = stack.enter_context(
                ProcessPoolExecutor(
                    processes,
                    # Threads of this process (a progress bar's) must not be forked.
                    multiprocessing.get_context("spawn"),
                    _begin,
                    (rollouts,),
                )
            )

            def run(tasks: Sequence[Task]) -> Iterable[tuple[SimulatedReport, ...]]:
                return pool.map(_replay, tasks)

        return advise(rollouts, replay(rollouts, run))


_rollouts: Rollouts
"""Of a process of the pool."""


def _begin(rollouts: Rollouts) -> None:
    global _rollouts
    _rollouts = rollouts


def _replay(task: Task) -> tuple[SimulatedReport, ...]:
    return _rollouts.replay(task)


def run_advise(
    console: Console,
    question: Question,
    *,
    processes: int,
    output: Path | None = None,
    plot: Path | None = None,
) -> Advice:
    """Answer a question, print the answer and write it.

    Raises:
        OSError: a file cannot be written.
        ValueError: an option or a file is wrong, or cannot be read.
    """
    for option, path in (("output", output), ("plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{option} is {path}; {path.parent} is no directory, make it first")
    began = time.perf_counter()
    with console.status("replaying iterations"):
        advice = answer(question, processes)
    seconds = time.perf_counter() - began
    model = (question.model or "MODEL").removesuffix("/config.json")
    # An engine refuses a profile that was not measured on it.
    measured = None if advice.modelled or not question.profile else question.profile.resolve()
    pasted = settings(
        advice,
        model,
        None if question.profile else question.max_num_seqs,
        str(measured) if measured else None,
    )
    show(console, advice, pasted)
    if output is not None:
        content = {**advice.to_json(), "settings": pasted, "simulated_in_seconds": seconds}
        write_whole(output, to_json(content))
    if plot is not None:
        from pat_vllm.cli.advise_plot import plot_advice

        plot_advice(advice, plot)
    written = ", ".join(str(path) for path in (output, plot) if path is not None)
    console.print(f"Simulated in {seconds:.0f} s." + (f" Written: {written}" if written else ""))
    return advice


def show(console: Console, advice: Advice, pasted: dict[str, str]) -> None:
    """Print an advice."""
    kind = "modelled" if advice.modelled else "simulated"
    static = advice.sides.static
    table = Table(title=heading(advice), title_justify="left")
    table.add_column("side")
    for column in (f"seconds, {kind}", f"vs best static, {kind}"):
        table.add_column(column, justify="right")
    best = sum(static.seconds)
    for label, one in rows(advice):
        seconds = sum(one.seconds)
        table.add_row(
            label + (" (best static)" if one is static else ""),
            f"{seconds / len(one.seconds):.1f}",
            f"{round(seconds / best - 1, 3) + 0.0:+.1%}",
        )
    console.print(table)
    console.print(f"[bold]{verdict(advice)}[/bold]")
    console.print(f"PAT in the last iteration: {advice.path} live requests ({kind}).")
    parts = Table(title=PARTS, title_justify="left")
    parts.add_column("part", no_wrap=True)
    for column in (f"saves, {kind}", f"95% interval, {kind}"):
        parts.add_column(column, justify="right")
    parts.add_column("compared")
    for source in advice.sources:
        mean, low, high, *_ = percents(source.gain)
        parts.add_row(source.name, mean, f"{low} to {high}", source.meaning)
    console.print(parts)
    console.print(
        "Settings:" if advice.pays else "Settings of the best static layout, without PAT:"
    )
    for name, text in pasted.items():
        console.print(f"[bold]# {name}[/bold]")
        console.print(text, markup=False, soft_wrap=True)
    if advice.modelled:
        console.print(
            "Modelled from public figures of the GPU; absolute times may be off by tens of percent."
        )
