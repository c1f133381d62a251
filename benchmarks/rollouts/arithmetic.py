"""Problems of several steps with verifiable answers, and worked solutions in many wordings. Pure.

A problem names numbers and how others follow from them, modulo 100. A solution takes the steps in
any order that works, tersely or digit by digit, checks some of them again, and sometimes goes over
everything once more. Steps are wrong at times, and a check finds that: so solutions differ in
length and in whether they are right, and there is something to learn.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
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

_NAMES = string.ascii_letters
_WORDS = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True)
class Step:
    """`name = left sign right`; operands are names or numbers."""

    name: str
    left: str | int
    sign: str
    right: str | int


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
            values[step.name] = compute(step, values)
        return values[self.steps[-1].name]


def compute(step: Step, values: dict[str, int]) -> int:
    """The value of a step, of which the operands are known."""
    left, right = (values.get(str(side), side) for side in (step.left, step.right))
    assert isinstance(left, int) and isinstance(right, int)
    result = {"+": left + right, "-": left - right, "*": left * right}[step.sign]
    return result % MODULUS


def problem(rng: random.Random) -> Problem:
    """A problem; how many steps it takes is log-normal."""
    size = round(MEDIAN_STEPS * rng.lognormvariate(0, SIGMA))
    size = min(MOST_STEPS, max(1, size))
    names = rng.sample(_NAMES, len(_NAMES))
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
    return Problem(given, tuple(steps), _question(rng, given, steps))


# -------------------------------------------------------------------- wording


def _question(rng: random.Random, given: dict[str, int], steps: list[Step]) -> str:
    facts = {
        name: rng.choice([f"{name} is {value}.", f"{name} = {value}.", f"Let {name} be {value}."])
        for name, value in given.items()
    }
    for step in steps:
        name, left, sign, right = step.name, step.left, step.sign, step.right
        facts[name] = rng.choice(
            [
                f"{name} is {left} {_WORDS[sign]} {right}.",
                f"{name} = {left} {sign} {right}.",
                f"Let {name} be {left} {sign} {right}.",
            ]
        )
    said = [*given, *(step.name for step in _in_some_order(rng, given, steps))]
    name = steps[-1].name
    asked = rng.choice([f"What is {name}?", f"Find {name}.", f"How much is {name}?"])
    return " ".join(["All numbers are modulo 100.", *(facts[number] for number in said), asked])


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
    return _Solution(rng, of).text()


_OPENINGS = (
    "Let me work this out step by step.",
    "We take one step after the other.",
    "Okay, let us see what follows from what.",
    "First I write down what is known.",
    "I will go through it slowly.",
    "Let's begin with the numbers that are given.",
)
_LINKS = ("Next,", "Then", "Now", "So", "After that,", "With this,", "Therefore", "Also", "Hence")
_DOUBTS = (
    "Wait, let me check {}.",
    "Hmm, is {} right?",
    "Let me recheck {}.",
    "Just to be sure about {}:",
    "I want to verify {} again.",
)
_RIGHT = ("Yes, {} is right.", "Good, it is {}.", "That is {} again.", "So {} holds.", "Okay, {}.")
_WRONG = ("No, it is {}.", "That was wrong, it is {}.", "I made a mistake: it is {}.")
_AGAIN = (
    "Let me go over all of it again.",
    "Before I answer, I do everything once more.",
    "To be safe, I recompute the whole thing.",
    "Let me double-check all steps.",
)
_CLOSINGS = (
    "That was the last step.",
    "This is what was asked.",
    "Now everything is known.",
    "So we are done.",
    "",
)


class _Solution:
    def __init__(self, rng: random.Random, of: Problem) -> None:
        self._rng = rng
        self._problem = of
        self._values = dict(of.given)
        self._verbosity = rng.betavariate(0.6, 1.2)
        self._links = rng.sample(_LINKS, 5)

    def text(self) -> str:
        choice = self._rng.choice
        parts = [choice(_OPENINGS), *self._given()]
        for step in self._order():
            parts += self._step(step, P_WRONG)
            if self._rng.random() < P_CHECK:
                parts += self._check(step)
        while self._rng.random() < P_OVER_AGAIN:
            parts.append(choice(_AGAIN))
            for step in self._order():
                parts += self._step(step, 0.0)
        last = self._problem.steps[-1].name
        parts += [choice(_CLOSINGS), f"Answer: {self._values[last]}"]
        return " ".join(filter(None, parts))

    def _given(self) -> list[str]:
        names = list(self._problem.given)
        self._rng.shuffle(names)
        if self._rng.random() < 0.4:
            return []
        wording = self._rng.choice(["{} is {}.", "We have {} = {}.", "{} = {} is given."])
        return [wording.format(name, self._problem.given[name]) for name in names]

    def _order(self) -> list[Step]:
        return _in_some_order(self._rng, self._problem.given, self._problem.steps)

    def _step(self, step: Step, p_wrong: float) -> list[str]:
        value = compute(step, self._values)
        wrong = self._rng.random() < p_wrong
        if wrong:
            value = (value + self._rng.choice([-10, -2, -1, 1, 2, 10])) % MODULUS
        a, b = (self._values.get(str(side), side) for side in (step.left, step.right))
        name, sign = step.name, step.sign
        fact = f"{step.left} {sign} {step.right}"
        if not wrong and self._rng.random() < self._verbosity:
            how = _digit_by_digit(int(a), sign, int(b))
            said = self._rng.choice(
                [
                    f"{name} = {fact}, for which we need {a} {sign} {b}: {how}. It is {value}.",
                    f"{name} is {fact}. {a} {sign} {b}: {how}, so {name} is {value}.",
                    f"compute {name} = {fact} = {a} {sign} {b}; {how}; it is {value}.",
                ]
            )
        else:
            said = self._rng.choice(
                [
                    f"{name} = {fact} = {a} {sign} {b} = {value}.",
                    f"{name} is {fact}, that is {a} {sign} {b} = {value}.",
                    f"{name} = {fact}, and {a} {sign} {b} gives {value}.",
                    f"from {name} = {fact} we get {a} {sign} {b} = {value}.",
                    f"{name} is {fact} = {value}.",
                ]
            )
        self._values[name] = value
        return [self._rng.choice(self._links), said] if self._rng.random() < 0.7 else [said]

    def _check(self, step: Step) -> list[str]:
        rng, before, right = self._rng, self._values[step.name], compute(step, self._values)
        self._values[step.name] = right
        a, b = (self._values.get(str(side), side) for side in (step.left, step.right))
        how = _digit_by_digit(int(a), step.sign, int(b))
        said = rng.choice(_RIGHT if right == before else _WRONG).format(right)
        return [rng.choice(_DOUBTS).format(step.name), f"{a} {step.sign} {b}: {how}.", said]


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
