"""The policy that a user's options ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.policy_config import (
    PredictorPolicyConfig,
    SchedulePolicyConfig,
    StaticPolicyConfig,
)
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.policy import Policy, SchedulePolicy, StayPolicy
from pat_vllm.profile import Profile


def make_policy(
    config: PATConfig,
    layouts: Sequence[Layout],
    profile: Callable[[str | None], Profile],
    costs: CostModel,
    bound: int,
    draft_lengths: Sequence[int] = (0,),
) -> Policy:
    """Make the policy.

    Args:
        layouts: the engine's, base first.
        profile: reads the profile from a named file, or gets the engine's own; called only by a
            policy that predicts.
        costs: the engine's. A policy that predicts gives it the profile, and predicts with it.
        bound: longest possible response, tokens.
        draft_lengths: among which a policy that predicts may choose, ascending.

    Raises:
        ValueError: a file that the options name cannot be used.
    """

    of_tp = {layout.tp: layout for layout in layouts}  # has those of the policy: they were checked
    match config.policy:
        case StaticPolicyConfig():
            return StayPolicy(default_layout=config.default_layout(layouts))
        case SchedulePolicyConfig(switch_at=switch_at, num_speculative_tokens=drafts):
            return SchedulePolicy(
                default_layout=layouts[0],
                table=tuple((live, of_tp[tp]) for live, tp in sorted(switch_at.items())),
                drafts={of_tp[tp]: ((1, 1, length),) for tp, length in drafts.items()},
            )
        case PredictorPolicyConfig() as options:
            if len(layouts) == 1 and len(draft_lengths) == 1:
                return StayPolicy(default_layout=layouts[0])
            # Its models are imported by the engines that use them.
            from pat_vllm.predictor.adaptive import AdaptivePolicy

            return AdaptivePolicy(
                profile(options.profile),
                bound=options.length_bound or bound,
                costs=costs,
                state_dir=Path(config.state_dir) if config.state_dir else None,
                draft_lengths=draft_lengths,
                control_every=options.control_every,
            )
