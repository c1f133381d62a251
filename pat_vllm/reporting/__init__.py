"""What an engine has done: the report, the history that it is made of, a trainer's log line.

Imports neither torch nor vLLM.
"""

from pat_vllm.reporting.history import EngineHistory, RingBuffer
from pat_vllm.reporting.run import Run
from pat_vllm.reporting.text import describe_awaited
from pat_vllm.reporting.values import (
    REFUSALS,
    SWITCH_REASONS,
    BatchReport,
    ControlComparison,
    DecisionReport,
    DraftCounts,
    DraftSample,
    LayoutSteps,
    LiveSample,
    PredictorReport,
    RefusedSwitch,
    Report,
    SwitchReport,
)

__all__ = [
    "REFUSALS",
    "SWITCH_REASONS",
    "BatchReport",
    "ControlComparison",
    "DecisionReport",
    "DraftCounts",
    "DraftSample",
    "EngineHistory",
    "LayoutSteps",
    "LiveSample",
    "PredictorReport",
    "RefusedSwitch",
    "Report",
    "RingBuffer",
    "Run",
    "SwitchReport",
    "describe_awaited",
]
