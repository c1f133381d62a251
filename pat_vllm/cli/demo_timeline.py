"""The demo's timeline in ASCII: live requests and layouts of one run over time."""

from __future__ import annotations

from rich.text import Text

from pat_vllm.layout import Layout
from pat_vllm.reporting import Run
from pat_vllm.reporting.plot import layout_name

_MARKS = ":#%@&+*"
"""What stands for a layout in the drawn timeline, in order of appearance."""
_COLOURS = ("blue", "dark_orange", "green", "magenta", "cyan", "red", "yellow")


def draw_timeline(run: Run, width: int = 64) -> list[str]:
    """Live requests (upwards, each row half of the one above) and layout over time, in ASCII."""
    live, spans = run.live, run.spans
    most = max(count for _, count in live)
    marks: dict[Layout, str] = {}
    for layout, _, _ in spans:
        marks.setdefault(layout, _MARKS[len(marks) % len(_MARKS)])

    columns: list[tuple[int, str]] = []
    for column in range(width):
        at = (column + 0.5) / width * run.seconds
        count = next((n for start, n in reversed(live) if start <= at), most)
        layout = next(layout for layout, _, end in spans if at <= end)
        columns.append((count, marks[layout]))

    levels = [most]
    while levels[-1] > 1:
        levels.append(1 << (levels[-1] - 1).bit_length() - 1)
    lines = [
        f"{level:>6} |" + "".join(mark if n >= level else " " for n, mark in columns).rstrip()
        for level in levels
    ]
    end = f"{run.seconds:.1f} s"
    lines.append(" " * 7 + "+" + "-" * width)
    lines.append(" " * 8 + "0 s" + end.rjust(width - 3))
    lines += [f"{mark * 3:>6}  {layout_name(layout)}" for layout, mark in marks.items()]
    lines += [
        f"        switch {s.source} -> {s.target} at {s.at - run.began:.2f} s: "
        f"{s.num_seqs} live, "
        f"{s.migrated} moved with their KV ({s.kv_bytes / 1e6:.1f} MB), {s.seconds * 1e3:.0f} ms"
        for s in run.switches
    ]
    return lines


def coloured(line: str) -> Text:
    """A line of the timeline with a colour for each layout."""
    text = Text(line)
    if line[7:8] == "|" or line.strip()[:1] in _MARKS:
        for mark, colour in zip(_MARKS, _COLOURS, strict=True):
            text.highlight_regex("(?<=[| ])[" + mark + "]+|[" + mark + "]{2,}", colour)
    return text
