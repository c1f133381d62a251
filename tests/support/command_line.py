"""Commands of PAT's, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from pat_vllm.cli.app import app


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit status, and what was printed, without boxes and ends of lines."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, " ".join(done.output.replace("│", " ").split())
