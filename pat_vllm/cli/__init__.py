"""The `pat-vllm` command."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pat_vllm.text_only import without_vision_and_audio

if multiprocessing.parent_process() is not None:
    # The engine of a command: its processes begin by importing the command.
    without_vision_and_audio()

app = typer.Typer(
    name="pat-vllm",
    help="Tensor parallelism that changes during generation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Tensor parallelism that changes during generation."""
    # Without a callback, Typer would turn an only command into the program itself.


@app.command("random-model")
def write_random_model(
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
    arch: Annotated[str, typer.Option(help="qwen3, qwen2 or llama.")] = "qwen3",
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 128,
    layers: Annotated[int, typer.Option(help="Number of decoder layers.")] = 3,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of one head.")] = 32,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP.")] = 256,
    vocab: Annotated[int, typer.Option(help="Vocabulary size; from 259 on, of bytes.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_position_embeddings: Annotated[int, typer.Option(help="Longest context, tokens.")] = 2048,
    tie: Annotated[bool, typer.Option(help="Tie the output head to the embeddings.")] = False,
    gain: Annotated[float, typer.Option(help="Spread of the logits; less is more even.")] = 4.0,
    repeat: Annotated[
        float, typer.Option(help="How much its text repeats a phrase; 0 is not, 1.5 is mostly.")
    ] = 0.0,
    phrase: Annotated[int, typer.Option(help="Tokens of that phrase.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a random model with a tokenizer: real shapes and timings without a download."""
    from pat_vllm.cli.random_model import make_model

    without_vision_and_audio()
    try:
        parameters = make_model(
            path,
            arch=arch,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=vocab,
            dtype=dtype,
            max_position_embeddings=max_position_embeddings,
            tie=tie,
            gain=gain,
            repeat=repeat,
            phrase=phrase,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{path}: {arch}, {parameters / 1e6:.1f}M parameters, {dtype}")


@app.command("demo")
def run_demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint to use instead of a random model; `repeating` is a random model "
            "whose text repeats itself, so that drafts are accepted."
        ),
    ] = None,
    models_dir: Annotated[
        Path, typer.Option(help="Where a random model (0.7 GB) is made once and kept.")
    ] = Path(".models"),
    ranks: Annotated[int, typer.Option(min=2, help="Worker processes.")] = 2,
    requests: Annotated[int, typer.Option(min=2, help="Requests in the batch.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest response, tokens.")] = 320,
    switch_at: Annotated[int, typer.Option(min=1, help="Live requests at which to switch.")] = 16,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Speculative decoding in all runs: n-gram drafts.")
    ] = False,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="With --speculate: draft tokens a request and step.")
    ] = 4,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; 1 by default, 0 with --speculate.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and sampling.")] = 0,
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("demo.png"),
) -> None:
    """Run a long-tail batch as replicas, as one group, and switching; compare and plot.

    Exits with 1 when the outputs of the three runs are not the same, token by token.
    """
    from rich.console import Console

    from pat_vllm.cli.demo import demo
    from pat_vllm.cli.engine_run import RunFailed

    without_vision_and_audio()
    try:
        agree = demo(
            Console(highlight=False),
            model=model,
            models_dir=models_dir,
            ranks=ranks,
            requests=requests,
            max_tokens=max_tokens,
            switch_at=switch_at,
            num_speculative_tokens=num_speculative_tokens if speculate else 0,
            temperature=float(not speculate) if temperature is None else temperature,
            seed=seed,
            output=output,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RunFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if not agree:
        raise typer.Exit(1)


@app.command("doctor")
def run_doctor(
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a checkpoint, or a config.json: what is refused, and memory."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Compute memory for so many of this GPU (H100, H200); start no engine."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Worker processes, one for each GPU.")] = 2,
    layouts: Annotated[
        str | None, typer.Option(help="Tensor-parallel sizes, as in pat.layouts: 1,2,4.")
    ] = None,
    base_tp: Annotated[int, typer.Option(min=1, help="As in pat.base_tp.")] = 1,
    engine: Annotated[
        str | None, typer.Option(help="Further options of vLLM's LLM, as a JSON object.")
    ] = None,
    shape: Annotated[str, typer.Option(help="Of the random model: tiny or large.")] = "tiny",
    dtype: Annotated[
        str | None, typer.Option(help="Of the random model; float32 on CPU, else bfloat16.")
    ] = None,
    speculate: Annotated[
        int, typer.Option(min=0, help="Longest n-gram drafts of the self-test; 0 is none.")
    ] = 0,
    all_stages: Annotated[
        bool, typer.Option("--all", help="Also engines with CUDA graphs, PIECEWISE and FULL.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where to write doctor.json and doctor.png.")
    ] = None,
) -> None:
    """Test whether this machine is fit: environment, memory, and engines against stock vLLM.

    Nothing is downloaded: the self-test's models are random. Exits with 1 when a stage fails.
    """
    from rich.console import Console

    from pat_vllm.cli.doctor import doctor, engine_options
    from pat_vllm.cli.profile import pat_options

    without_vision_and_audio()
    try:
        fit = doctor(
            Console(highlight=False),
            model=model,
            gpu=gpu,
            ranks=ranks,
            pat=pat_options(layouts, base_tp),
            engine=engine_options(engine),
            shape=shape,
            dtype=dtype,
            draft_length=speculate,
            all_stages=all_stages,
            output_dir=output_dir,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not fit:
        raise typer.Exit(1)


@app.command("profile")
def take_engine_profile(
    model: Annotated[str, typer.Argument(help="Checkpoint, as vLLM takes it.")],
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks of the engine.")] = 2,
    dtype: Annotated[str, typer.Option(help="As in vLLM.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="As in vLLM.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="As in vLLM.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="As in vLLM.")] = None,
    enforce_eager: Annotated[bool, typer.Option(help="As in vLLM.")] = False,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="As in vLLM.")] = None,
    block_size: Annotated[int | None, typer.Option(help="As in vLLM.")] = None,
    layouts: Annotated[
        str | None, typer.Option(help="Tensor-parallel sizes, as in pat.layouts: 1,2,4.")
    ] = None,
    base_tp: Annotated[int, typer.Option(min=1, help="As in pat.base_tp.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="JSON to write; named after the engine by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Measure only what an engine's start would measure.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which the rest is left out.")
    ] = None,
) -> None:
    """Measure an engine's steps and switches; run it again to go on after an interruption.

    The profile holds for engines with the same flags in the same environment, named in
    pat.policy.profile.
    """
    from rich.console import Console

    from pat_vllm.cli.profile import default_budget, engine_arguments, take_profile
    from pat_vllm.profiling.profile import ProfileError

    without_vision_and_audio()
    try:
        engine = engine_arguments(
            model,
            layouts,
            base_tp,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=enforce_eager,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
        )
        take_profile(
            Console(highlight=False), engine, output, quick, budget or default_budget(quick)
        )
    except ProfileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except RuntimeError as error:
        typer.echo(f"the engine failed: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _moved(to: str) -> Callable[..., None]:
    """Callback of an option that lives elsewhere now."""

    def refuse(given: str | None) -> None:
        if given is not None:
            raise typer.BadParameter(f"moved: {to}, in a checkout of pat-vllm")

    return refuse


def _moved_option(to: str) -> Any:
    return typer.Option(hidden=True, callback=_moved(to), help=f"Moved: {to}.")


_PAPER = "python -m benchmarks.paper simulate"


@app.command("simulate")
def run_simulation(
    profile: Annotated[
        Path, typer.Option(help="Profile of the engine, as `pat-vllm profile` writes it.")
    ],
    lengths: Annotated[
        Path | None, typer.Option(help="Response lengths: a JSON trace, or one per line.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="Without --lengths: deepscaler, log-normal, two-mode, alike, uniform, straggler, "
            "grpo."
        ),
    ] = "deepscaler",
    iterations: Annotated[int, typer.Option(min=1, help="Batches, one after another.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests in a batch.")] = 128,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--bound", min=1, help="Longest response, tokens.")
    ] = 16384,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths.")] = 0,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where to write JSON, Markdown and PNG.")
    ] = None,
    gpu: Annotated[str | None, _moved_option(f"{_PAPER} --gpu")] = None,
    model: Annotated[str | None, _moved_option(f"{_PAPER} --model")] = None,
    ranks: Annotated[str | None, _moved_option(f"{_PAPER} --ranks")] = None,
    switch_cost: Annotated[str | None, _moved_option(f"{_PAPER} --switch-cost")] = None,
    seeds: Annotated[str | None, _moved_option("python -m benchmarks.paper settings")] = None,
    paper: Annotated[
        bool | None,
        typer.Option(
            "--paper", hidden=True, callback=_moved("python -m benchmarks.paper settings")
        ),
    ] = None,
) -> None:
    """Replay response lengths on an engine's profile: every static layout, and PAT."""
    from rich.console import Console

    from pat_vllm.cli.simulate import simulate_workload

    try:
        simulate_workload(
            Console(highlight=False),
            profile=profile,
            lengths=lengths,
            workload=workload,
            iterations=iterations,
            requests=requests,
            max_tokens=max_tokens,
            seed=seed,
            output_dir=output_dir,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command("advise")
def advise_user(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint's directory or config.json; llama-3.1-8b, qwen3-14b."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Modelled GPU: A40, H100, H200.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the engine, of a node.")] = 8,
    profile: Annotated[
        Path | None, typer.Option(help="An engine's profile in place of --gpu and --gpus.")
    ] = None,
    responses: Annotated[
        int, typer.Option(help="Of an iteration, on these GPUs: prompts x samples.")
    ] = 1024,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Earlier rollouts: a JSON array of lengths, one per line, or JSON lines of a "
            "trainer's dump (docs/advise.md)."
        ),
    ] = None,
    shape: Annotated[
        str,
        typer.Option(
            help="Without --lengths: deepscaler, log-normal, two-mode, alike, uniform, straggler, "
            "grpo."
        ),
    ] = "deepscaler",
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest response; the longest in --lengths, or 16384."),
    ] = None,
    acceptance: Annotated[
        float,
        typer.Option(help="Share of first draft tokens accepted; 0: no drafts."),
    ] = 0.0,
    drafting: Annotated[
        float, typer.Option(help="Seconds a drafter adds to a step; with --gpu.")
    ] = 0.0,
    max_num_seqs: Annotated[int, typer.Option(help="Of a GPU, as in vLLM; with --gpu.")] = 256,
    iterations: Annotated[
        int | None, typer.Option(help="That are replayed, each drawn anew; 8, or 6 with drafts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="That share the work.")] = 2,
    output: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write.")] = None,
) -> None:
    """Say whether PAT would pay for your rollouts, and with which settings. Simulated."""
    from rich.console import Console

    from pat_vllm.cli.advise import Question, run_advise

    try:
        question = Question(
            model=model,
            gpu=gpu,
            gpus=gpus,
            profile=profile,
            responses=responses,
            lengths=lengths,
            shape=shape,
            max_tokens=max_tokens,
            acceptance=acceptance,
            drafting=drafting,
            max_num_seqs=max_num_seqs,
            iterations=iterations,
            seed=seed,
        )
        run_advise(
            Console(highlight=False), question, processes=processes, output=output, plot=plot
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command("plot")
def plot_report(
    report: Annotated[Path, typer.Argument(help="JSON, as a report's `save` writes it.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Picture to write (.png, .svg, .pdf); by default named after the JSON."),
    ] = None,
) -> None:
    """Draw what an engine did: live requests, layouts, draft lengths, switches and savings."""
    from pat_vllm.reporting import Report
    from pat_vllm.reporting.plot import summary

    try:
        loaded = Report.load(report)
        picture = output or report.with_suffix(".png")
        loaded.plot(picture)
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{summary(loaded)}\nplot: {picture}")


_MOVED = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("bench", hidden=True, context_settings=_MOVED, add_help_option=False)
def bench_moved() -> None:
    """Say where the benchmark is now."""
    _refuse_command("bench", "python -m benchmarks.bench")


def _refuse_command(name: str, to: str) -> None:
    typer.echo(f"pat-vllm {name} has moved: {to}, in a checkout of pat-vllm", err=True)
    raise typer.Exit(2)
