"""`pat-vllm profile`: measures an engine's steps and switches, for engines with the same flags.

The engine measures a few points at a time. Their samples are added to OUTPUT.part at once, so that
a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pat_vllm.commands import PROFILE_COMMAND
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import FileError, cut, name_of, parse_json, read_text, shown
from pat_vllm.files.writing import write_whole
from pat_vllm.layout import Layout
from pat_vllm.profiling.plan import FULL_SECONDS, QUICK_SECONDS
from pat_vllm.profiling.points import POINTS
from pat_vllm.profiling.profile import Profile, ProfileError, StepSample, SwitchSample
from pat_vllm.text_only import starting_with_safe_path

if TYPE_CHECKING:
    from vllm import LLM

_SLICE = 4
"""Points that the engine measures between two saves: a few seconds."""


@dataclass
class Partial:
    """The file of an unfinished run: a line with the key, then a line for each slice.

    A line that was being written when the run was stopped is dropped.
    """

    path: Path
    header: Mapping[str, Any]
    done: set[str] = field(default_factory=set)
    steps: list[StepSample] = field(default_factory=list)
    switches: list[SwitchSample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, header: Mapping[str, Any]) -> Partial:
        """Begin a file, or go on with one.

        Raises:
            ProfileError: it belongs to another engine, or is no such file.
        """
        partial = cls(path, header)
        advice = "delete it, or choose another --output"
        try:
            text = read_text(path, "unfinished profile") if path.exists() else ""
        except FileError as error:
            raise ProfileError(f"{error}; {advice}") from None
        if not text:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial._append({"key": header["key"]})
            return partial
        try:
            lines = text.splitlines(keepends=True)
            cut_off = not lines[-1].endswith("\n")
            if cut_off:
                lines.pop()
            first, *others = [parse_json(line) for line in lines]
            of_engine = {**first["key"]}
            for one in others:
                partial._take(one)
        except (ValueError, KeyError, TypeError) as error:
            raise ProfileError(
                f"{name_of(path)} is no unfinished profile ({shown(error)}); {advice}"
            ) from None
        names = sorted({*of_engine, *header["key"]})
        different = [
            f"{cut(name)} is {shown(header['key'].get(name))} now and "
            f"{shown(of_engine.get(name))} there"
            for name in names
            if header["key"].get(name) != of_engine.get(name)
        ]
        if different:
            raise ProfileError(
                f"{path} holds the unfinished profile of another engine: {'; '.join(different)}. "
                "Delete it, or choose another --output"
            )
        if cut_off:
            write_whole(path, "".join(lines))
        return partial

    def add(self, points: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> None:
        """Keep what the engine has measured."""
        line = {"points": list(points), **answer}
        self._append(line)
        self._take(line)

    def missing(self, points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of the points that have not been measured yet."""
        return [point for point in points if _name(point) not in self.done]

    def profile(self, note: str) -> Profile:
        """The finished profile."""
        return Profile(
            **self.header,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            steps=tuple(self.steps),
            switches=tuple(self.switches),
            note=note,
        )

    def _take(self, line: Mapping[str, Any]) -> None:
        self.done.update(_name(point) for point in line["points"])
        self.steps += [StepSample(**values) for values in line["steps"]]
        self.switches += [SwitchSample(**values) for values in line["switches"]]

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _name(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


def engine_arguments(model: str, pat: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`.

    Args:
        pat: PAT's options of the engine; the policy does not matter.
        options: of vLLM's; those that are None are left to vLLM.

    Raises:
        ValueError: PAT's options are not allowed, or do not fit the ranks.
    """
    PATConfig.parse(dict(pat)).check_layouts(options["tensor_parallel_size"])
    return {
        "model": model,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": {**pat, "policy": {"kind": "static"}}},
        # Requests are made of token ids.
        "skip_tokenizer_init": True,
        **{name: value for name, value in options.items() if value is not None},
    }


def take_profile(
    console: Console, engine: Mapping[str, Any], output: Path | None, quick: bool, budget: float
) -> Path:
    """Start an engine, measure it, write the profile, and print what it says.

    Args:
        engine: keyword arguments of `vllm.LLM`.
        output: file to write; None names it after model, hardware and date.
        quick: measure only what an engine's own start would.
        budget: seconds of measuring after which the rest is left out.

    Returns:
        The file.

    Raises:
        ProfileError: an unfinished profile of another engine is in the way.
    """
    with _engine(console, engine) as llm:
        (described,) = llm.collective_rpc(PROFILE_COMMAND, kwargs={"quick": quick})
        header, points = described["header"], described["points"]
        path = output or Path(default_name(header))
        partial = Partial.open(path.with_name(path.name + ".part"), header)
        console.print(header["title"], soft_wrap=True)
        if partial.done:
            console.print(f"going on with {partial.path}", soft_wrap=True)
        left_out = _measure(console, llm, partial, points, quick, budget)
    note = "pat-vllm profile"
    if left_out:
        note += f"; {left_out} of {len(points)} points left out for want of time"
    profile = partial.profile(note)
    profile.save(path)
    partial.path.unlink()
    show(console, profile)
    console.print(f"\nprofile: {path}", soft_wrap=True)
    return path


@contextmanager
def _engine(console: Console, engine: Mapping[str, Any]) -> Iterator[LLM]:
    # Nothing that decides the ranks' speed is set here: the profile is for engines that are
    # started from the same environment.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    with console.status("starting the engine"), starting_with_safe_path():
        llm = LLM(**engine)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _measure(
    console: Console,
    llm: LLM,
    partial: Partial,
    points: Sequence[Any],
    quick: bool,
    budget: float,
) -> int:
    """Have the engine measure what is missing. Returns how many points were left out."""
    waiting = partial.missing(points)
    started = time.monotonic()
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(points), completed=len(points) - len(waiting))
        while waiting and time.monotonic() - started < budget:
            part, waiting = waiting[:_SLICE], waiting[_SLICE:]
            progress.update(task, description=str(POINTS.validate_python(part)[0]))
            (answer,) = llm.collective_rpc(PROFILE_COMMAND, args=(list(part), quick))
            partial.add(part, answer)
            progress.advance(task, len(part))
        progress.update(task, description="")
    return len(waiting)


def default_name(header: Mapping[str, Any]) -> str:
    """A file name from model, hardware and date."""
    model = header["key"]["model"]
    parts = (
        str(model["architecture"]).removesuffix("ForCausalLM"),
        f"{model.get('num_hidden_layers')}x{model.get('hidden_size')}",
        f"{header['ranks']}x{header['key']['hardware']}",
        datetime.now().strftime("%Y-%m-%d"),
    )
    return re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(parts)).strip("-") + ".json"


def table_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Cells by layout: layout, samples, batches, contexts, milliseconds of a step at batch 1 and
    at the largest batch, of an empty switch from it."""
    rows: list[tuple[str, ...]] = []
    for layout in profile.layouts:
        decodes = [s for s in _decodes(profile, layout) if not s.k]
        busy = [s for s in decodes if s.busy == layout.replicas] or decodes
        batches = [s.batch for s in decodes]
        contexts = [s.context // s.batch for s in decodes]
        empty = [s.seconds for s in profile.switches if s.source == layout and not s.num_seqs]
        rows.append(
            (
                str(layout),
                str(sum(1 for s in profile.steps if s.layout == layout)),
                f"{min(batches)}-{max(batches)}",
                f"{min(contexts)}-{max(contexts)}",
                f"{1e3 * _shortest(busy, 1):.1f}",
                f"{1e3 * _shortest(busy, max(batches)):.1f}",
                f"{1e3 * statistics.median(empty):.1f}" if empty else "-",
            )
        )
    return rows


def draft_lines(profile: Profile) -> Iterator[str]:
    """For each layout, what a step takes by its drafts, at the largest batch with all of them."""
    for layout in profile.layouts:
        decodes = [s for s in _decodes(profile, layout) if s.busy == layout.replicas]
        by_k = defaultdict(list)
        for sample in decodes:
            if sample.drafts == sample.k * sample.batch:
                by_k[sample.k].append(sample)
        batches = [{s.batch for s in samples} for samples in by_k.values()]
        if len(by_k) > 1 and (common := set.intersection(*batches)):
            cells = [f"{k}: {1e3 * _shortest(by_k[k], max(common)):.1f}" for k in sorted(by_k)]
            of_batch = f"ms of a step at batch {max(common)}, by drafts of a request"
            yield f"{layout}: {of_batch}: {', '.join(cells)}"


def _decodes(profile: Profile, layout: Layout) -> list[StepSample]:
    return [s for s in profile.steps if s.layout == layout and s.batch and not s.prefill]


def _shortest(samples: Sequence[StepSample], batch: int) -> float:
    """Seconds of a step with this batch (or the nearest) and the shortest contexts."""
    nearest = min(samples, key=lambda s: (abs(s.batch - batch), s.context))
    return nearest.seconds


def show(console: Console, profile: Profile) -> None:
    """Print a table of what was measured, and how well a model of it does on points held out."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for heading in ("samples", "batch", "context", "ms at 1", "ms at most", "switch ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in table_rows(profile):
        table.add_row(*row)
    console.print(table)
    console.print(
        "layout: tensor parallel size (tp) and replicas (dp), all busy; batch: of one replica."
    )
    for line in draft_lines(profile):
        console.print(line)
    try:
        fits = _fits(profile)
    except ImportError as error:
        console.print(f"The error on held-out points is not shown: {error}")
        return
    for layout, fit in fits.items():
        if errors := sorted(fit.with_residual if fit.learned else fit.roofline):
            means = [statistics.mean(one) for one in (errors, fit.roofline, fit.with_residual)]
            console.print(
                f"{layout}: {len(errors)} held-out steps are predicted within {means[0]:.1%} on "
                f"average, nine in ten within {errors[int(0.9 * (len(errors) - 1))]:.1%}, by the "
                f"roofline {'with' if fit.learned else 'without'} its residual (without "
                f"{means[1]:.1%}, with {means[2]:.1%})"
            )


def _fits(profile: Profile) -> Mapping[Layout, Any]:
    from pat_vllm.predictor.step_time import StepTimeModel

    return StepTimeModel.fit(profile).fits


def default_budget(quick: bool) -> float:
    """Seconds of measuring unless a user says otherwise."""
    return QUICK_SECONDS if quick else FULL_SECONDS
