"""`pat-vllm plot`: what an engine did, drawn from its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.options import failed


def plot_report(
    report: Annotated[Path, typer.Argument(help="JSON, as a report's `save` writes it.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Picture to write (.png, .svg, .pdf); by default named after the JSON."),
    ] = None,
) -> None:
    """Draw what an engine did: live requests, layouts, draft lengths, switches and steps."""
    from pat_vllm.reporting import Report
    from pat_vllm.reporting.text import summary

    try:
        loaded = Report.load(report)
        picture = output or report.with_suffix(".png")
        loaded.plot(picture)
        text = summary(loaded)
    except ImportError as error:
        raise failed(error) from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    except (OverflowError, IndexError) as error:
        problem = f"report {report} cannot be drawn, as numbers in it are out of range: {error}"
        raise typer.BadParameter(problem) from error
    typer.echo(f"{text}\nplot: {picture}")
