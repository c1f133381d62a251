"""Problems of several steps with verifiable answers, and worked solutions in many wordings. Pure.

A problem names numbers and how others follow from them, modulo 100. A solution takes the steps in
any order that works, tersely or digit by digit, checks some of them again, and sometimes goes over
everything once more. Steps are wrong at times, and a check finds that: so solutions differ in
length and in whether they are right, and there is something to learn.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MODULUS = 100
MOST_STEPS = 36
MEDIAN_STEPS = 2.3
SIGMA = 0.95
"""Of the logarithm of the number of steps."""

P_WRONG = 0.06
"""Of a step."""
P_CHECK = 0.1
"""Of a step, to be checked at once."""
P_OVER_AGAIN = 0.15
"""Of a solution, to be gone over once more; and of that again."""

_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_GIVEN = ("{} is {}.", "{} = {}.", "Let {} be {}.")
_ASKED = ("What is {}?", "Find {}.", "How much is {}?")
_OPENINGS = (
    "Let me work this out step by step.",
    "We take one step after the other.",
    "Okay, let us see what follows from what.",
    "First I write down what is known.",
    "I will go through it slowly.",
    "Let's begin with the numbers that are given.",
)
_CLOSINGS = ("That was the last step.", "This is what was asked.", "So we are done.", "")
_LINKS = (
    "Next,",
    "Then",
    "Now",
    "So",
    "After that,",
    "With this,",
    "Therefore",
    "Also",
    "Hence",
    "",
)
_LONG = (
    "{name} = {fact}, for which we need {sum}: {how}. It is {value}.",
    "{name} is {fact}. {sum}: {how}, so {name} is {value}.",
    "compute {name} = {fact} = {sum}; {how}; it is {value}.",
)
_SHORT = (
    "{name} = {fact} = {sum} = {value}.",
    "{name} is {fact}, that is {sum} = {value}.",
    "{name} = {fact}, and {sum} gives {value}.",
    "from {name} = {fact} we get {sum} = {value}.",
    "{name} is {fact} = {value}.",
)
_DOUBTS = ("Wait, let me check {}.", "Hmm, is {} right?", "I want to verify {} again.")
_RIGHT = ("Yes, {} is right.", "Good, it is {}.", "That is {} again.", "So {} holds.")
_WRONG = ("No, it is {}.", "That was wrong, it is {}.", "I made a mistake: it is {}.")
_AGAIN = ("Let me go over all of it again.", "Before I answer, I do everything once more.")


@dataclass(frozen=True)
class Step:
    """`name = left sign right`; operands are names or numbers."""

    name: str
    left: str | int
    sign: str
    right: str | int

    def sum(self, values: dict[str, int]) -> tuple[int, str, int]:
        """The same in numbers; the operands are known."""
        left, right = (values.get(str(side), side) for side in (self.left, self.right))
        assert isinstance(left, int) and isinstance(right, int)
        return left, self.sign, right

    def value(self, values: dict[str, int]) -> int:
        """What it comes to."""
        left, sign, right = self.sum(values)
        return {"+": left + right, "-": left - right, "*": left * right}[sign] % MODULUS


@dataclass(frozen=True)
class Problem:
    """Numbers that are given, steps in an order that works, and the text of the question."""

    given: dict[str, int]
    steps: tuple[Step, ...]
    text: str

    @property
    def answer(self) -> int:
        """The value of the last step."""
        values = dict(self.given)
        for step in self.steps:
            values[step.name] = step.value(values)
        return values[self.steps[-1].name]


def problem(rng: random.Random) -> Problem:
    """A problem; how many steps it takes is log-normal."""
    size = min(MOST_STEPS, max(1, round(MEDIAN_STEPS * rng.lognormvariate(0, SIGMA))))
    names = rng.sample(string.ascii_letters, len(string.ascii_letters))
    given = {names.pop(): rng.randrange(2, MODULUS) for _ in range(1 + size // 4)}
    unused = list(given)
    steps: list[Step] = []
    for left_to_do in range(size, 0, -1):
        two = len(unused) > 1 and (len(unused) > left_to_do or rng.random() < 0.3)
        rng.shuffle(unused)
        left, name = unused.pop(), names.pop()
        if two:
            step = Step(name, left, rng.choice("+-"), unused.pop())
        elif rng.random() < 0.4:
            step = Step(name, left, "*", rng.randrange(2, 10))
        else:
            step = Step(name, left, rng.choice("+-"), rng.randrange(2, MODULUS))
        steps.append(step)
        unused.append(name)
    facts: dict[str, object] = dict(given)
    for step in _in_some_order(rng, given, steps):
        sign = rng.choice([step.sign, _WORDS[step.sign]])
        facts[step.name] = f"{step.left} {sign} {step.right}"
    said = [rng.choice(_GIVEN).format(name, fact) for name, fact in facts.items()]
    asked = rng.choice(_ASKED).format(steps[-1].name)
    text = " ".join(["All numbers are modulo 100.", *said, asked])
    return Problem(given, tuple(steps), text)


def _in_some_order(rng: random.Random, given: dict[str, int], steps: Sequence[Step]) -> list[Step]:
    """The steps in a random order that works."""
    known, left, order = set(given), list(steps), []
    while left:
        ready = [
            step
            for step in left
            if all(not isinstance(s, str) or s in known for s in (step.left, step.right))
        ]
        step = rng.choice(ready)
        left.remove(step)
        known.add(step.name)
        order.append(step)
    return order


def solution(rng: random.Random, of: Problem) -> str:
    """A worked solution, which ends in `Answer: N`. What is wrong and not found stays wrong."""
    values, verbosity = dict(of.given), rng.betavariate(0.6, 1.2)
    said = [rng.choice(_OPENINGS)]
    if rng.random() < 0.6:
        said += [f"We have {name} = {value}." for name, value in of.given.items()]
    said += _steps(rng, of, values, verbosity, P_WRONG)
    while rng.random() < P_OVER_AGAIN:
        said += [rng.choice(_AGAIN), *_steps(rng, of, values, verbosity, 0.0)]
    said += [rng.choice(_CLOSINGS), f"Answer: {values[of.steps[-1].name]}"]
    return " ".join(filter(None, said))


def _steps(
    rng: random.Random, of: Problem, values: dict[str, int], verbosity: float, p_wrong: float
) -> Iterator[str]:
    for step in _in_some_order(rng, of.given, of.steps):
        numbers, value = step.sum(values), step.value(values)
        a, sign, b = numbers
        words = {"name": step.name, "fact": f"{step.left} {sign} {step.right}"}
        words |= {"sum": f"{a} {sign} {b}", "how": _digit_by_digit(*numbers)}
        wrong = rng.random() < p_wrong
        said = value if not wrong else (value + rng.choice([-10, -2, -1, 1, 2, 10])) % MODULUS
        long = not wrong and rng.random() < verbosity
        yield rng.choice(_LINKS)
        yield rng.choice(_LONG if long else _SHORT).format(value=said, **words)
        if p_wrong and rng.random() < P_CHECK:
            yield rng.choice(_DOUBTS).format(step.name)
            yield "{sum}: {how}.".format(**words)
            yield rng.choice(_WRONG if wrong else _RIGHT).format(value)
            said = value
        values[step.name] = said


def _digit_by_digit(a: int, sign: str, b: int) -> str:
    """How `a sign b` comes out, in small sums, and modulo 100 where it has to be."""
    tens, ones = a // 10 * 10, a % 10
    if sign == "*":
        total = a * b
        how = f"{tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, together {total}"
    else:
        other, rest = b // 10 * 10, b % 10
        total = a + b if sign == "+" else a - b
        first, second = (tens + other, ones + rest) if sign == "+" else (tens - other, ones - rest)
        how = f"{tens} {sign} {other} = {first}, {ones} {sign} {rest} = {second}, together {total}"
    return how if 0 <= total < MODULUS else f"{how}, which is {total % MODULUS}"
