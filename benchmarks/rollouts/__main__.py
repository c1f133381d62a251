"""A policy that learns, its rollouts, and their replay with drafts of many kinds, in this order:

python -m benchmarks.rollouts pretrain
python -m benchmarks.rollouts learn
python -m benchmarks.rollouts replay
python -m benchmarks.rollouts placebo
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, machine, write_results
from benchmarks.rollouts.records import Rollouts
from benchmarks.rollouts.report import of_learning, of_replay

WHERE = ROOT / ".models" / "rollouts"
POLICY = WHERE / "policy"
ROLLOUTS = WHERE / "rollouts.npz"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of torch, for training")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("pretrain", help="train the policy on worked solutions")
    train.add_argument("--tokens", type=int, default=3_000_000)
    learn = commands.add_parser("learn", help="GRPO; keep all rollouts")
    learn.add_argument("--epochs", type=int, default=10)
    learn.add_argument("--prompts", type=int, default=64)
    learn.add_argument("--samples", type=int, default=8)
    learn.add_argument("--drafts", type=int, default=8, help="the most draft tokens")
    learn.add_argument("--output", type=Path, default=ROLLOUTS)
    learn.add_argument(
        "--without", nargs="*", metavar="SIDE", help="compare with other engines, but for these"
    )
    real = commands.add_parser(
        "pretrained", help="a pretrained model's responses, without learning"
    )
    real.add_argument("--model", type=Path, default=WHERE / "real")
    real.add_argument("--epochs", type=int, default=4)
    real.add_argument("--prompts", type=int, default=16)
    real.add_argument("--samples", type=int, default=8)
    real.add_argument("--drafts", type=int, default=4, help="n-gram draft tokens; 0 is none")
    real.add_argument("--output", type=Path, default=WHERE / "pretrained.npz")
    replay = commands.add_parser("replay", help="what drafters would have saved")
    replay.add_argument("rollouts", type=Path, nargs="?", default=ROLLOUTS)
    replay.add_argument("--drafts", type=int, nargs="+", default=[4, 8, 16], help="draft tokens")
    replay.add_argument("--name", default="rollouts-replay", help="of the results")
    other = commands.add_parser("placebo", help="what another prompt's responses cost as drafts")
    other.add_argument("rollouts", type=Path, nargs="?", default=ROLLOUTS)
    other.add_argument("--samples", type=int, default=8)
    other.add_argument("--drafts", type=int, default=8, help="the most draft tokens")
    other.add_argument("--repeats", type=int, default=6)
    commands.add_parser("costs", help="what keeping responses costs the engine core")
    args = parser.parse_args()
    facts = machine()
    body = {"arguments": {name: str(value) for name, value in vars(args).items()}}

    if args.command == "costs":
        from benchmarks.rollouts.costs import costs

        print(costs())
    elif args.command == "pretrain":
        from benchmarks.rollouts.model import pretrain

        shutil.rmtree(POLICY, ignore_errors=True)
        pretrain(POLICY, args.tokens, args.seed, args.threads)
    elif args.command == "learn":
        from benchmarks.rollouts.learn import HISTORY, SIDES
        from benchmarks.rollouts.learn import learn as run

        rollouts, epochs = run(
            POLICY,
            WHERE / "current",
            args.epochs,
            args.prompts,
            args.samples,
            args.seed,
            args.drafts,
            args.threads,
            args.output,
            [HISTORY] if args.without is None else [s for s in SIDES if s not in args.without],
        )
        picture = RESULTS / f"{facts['date'][:10]}-rollouts-learn.png"
        text = of_learning(rollouts, epochs, picture)
        write_results("rollouts-learn", facts, body | {"epochs": epochs}, text)
    elif args.command == "pretrained":
        from benchmarks.rollouts.pretrained import visits

        rollouts, epochs = visits(
            args.model, args.epochs, args.prompts, args.samples, args.seed, args.drafts
        )
        rollouts.save(args.output)
        text = of_learning(rollouts, epochs)
        write_results("rollouts-pretrained", facts, body | {"epochs": epochs}, text)
    elif args.command == "placebo":
        from benchmarks.rollouts.placebo import placebo

        rollouts = Rollouts.load(args.rollouts)
        text = placebo(WHERE / "current", rollouts, args.samples, args.drafts, args.repeats)
        write_results("rollouts-placebo", facts, body, text)
    else:
        rollouts = Rollouts.load(args.rollouts)
        picture = RESULTS / f"{facts['date'][:10]}-{args.name}.png"
        write_results(args.name, facts, body, of_replay(rollouts, args.drafts, picture))


if __name__ == "__main__":
    main()
