"""Which cached prefixes a switch carries, and where to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.models.kinds import FullAttention, Kinds, SlidingWindow, longest_hit
from pat_vllm.scheduler.switching import chains as module
from pat_vllm.scheduler.switching.chains import Chain, Chains, PlacedChain, Run, fill
from tests.support.kinds import full

Found = tuple[int, int, bytes]
Hashes = set[bytes]
Switch = tuple[list[Hashes], list[PlacedChain], list[list[str]], list[int]]


def chain(text: str) -> Chain:
    """A block for each letter, whose hash is all up to it."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


TEXTS = st.text("ab", max_size=6)


@st.composite
def switches(draw: st.DrawFn) -> Switch:
    """What source replicas have, the chains wanted, requests of the targets, and their room."""
    sources = [
        {block_hash for text in draw(st.lists(TEXTS, max_size=4)) for block_hash in chain(text)}
        for _ in range(draw(st.integers(1, 3)))
    ]
    live = [draw(st.lists(TEXTS, max_size=2)) for _ in range(draw(st.integers(1, 3)))]
    wanted = [
        PlacedChain(
            chain(text),
            draw(st.integers(0, len(sources) - 1)),
            draw(st.integers(0, len(live) - 1)),
        )
        for text in draw(st.lists(TEXTS, max_size=6))
    ]
    return sources, wanted, live, [draw(st.integers(0, 12)) for _ in live]


GROUPS = {
    "full": full(1, 1),
    "windows": (SlidingWindow(1, 1, window=3),),
    "both": (SlidingWindow(1, 1, window=3), FullAttention(1, 1), SlidingWindow(1, 1, window=2)),
}


@pytest.mark.parametrize("kinds", GROUPS.values(), ids=GROUPS)
@given(case=switches())
def test_what_is_carried_can_be_found_and_is_carried_once(kinds: Kinds, case: Switch) -> None:
    sources, wanted, live, room = case
    held = [
        [{chain(text)[place] for text in texts for place in kind.held(len(text))} for kind in kinds]
        for texts in live
    ]
    has = [[set(of_group) for of_group in groups] for groups in held]

    def find(replica: int, hashes: Chain, group: int) -> list[Found | None]:
        return [
            (replica, group, block_hash) if block_hash in sources[replica] else None
            for block_hash in hashes
        ]

    def hit(placed: PlacedChain) -> int:
        """What is found of a chain in the target."""
        there = has[placed.target_replica]
        return longest_hit(
            kinds, len(placed.hashes), lambda group, place: placed.hashes[place] in there[group]
        )

    chosen = fill(wanted, find, kinds, held, room)
    for index, runs in enumerate(chosen):
        for run in runs:
            for replica, group, block_hash in run.blocks:
                assert (replica, group) == (run.source_replica, run.group)
                assert block_hash in sources[replica]
                assert block_hash not in has[index][group], "carried twice, or there already"
                has[index][group].add(block_hash)
        assert has[index] == held[index]
        carried = sum(len(run.blocks) for run in runs)
        assert carried <= room[index]
        of_target = [placed for placed in wanted if placed.target_replica == index]
        if runs:
            assert any(map(hit, of_target)), "what was carried cannot be found"
        for place in of_target:
            there = sources[place.source_replica]
            cached = [*takewhile(there.__contains__, place.hashes)]
            if carried + len(kinds) * len(place.hashes) <= room[index]:
                assert hit(place) >= len(cached), "there was room for it"


def every(replica: int, hashes: Chain, group: int) -> Chain:
    return hashes


def hashes_of(runs: Iterable[Run[bytes]]) -> list[bytes]:
    return [block_hash for run in runs for block_hash in run.blocks]


def test_the_most_wanted_chain_comes_first_and_whole() -> None:
    wanted = [PlacedChain(chain("abc"), 0, 0), PlacedChain(chain("abd"), 0, 0)]
    (blocks,) = fill(wanted, every, full(1), [[set()]], [4])
    assert hashes_of(blocks) == [b"a", b"ab", b"abc", b"abd"]
    (blocks,) = fill(wanted, every, full(1), [[set()]], [2])
    assert hashes_of(blocks) == [b"a", b"ab"]


def test_what_has_room_is_shared_by_the_groups() -> None:
    """Ten blocks of room are five places of each of two groups."""
    whole = chain("aaaaaaaaaa")
    (runs,) = fill(
        [PlacedChain(whole, 0, 0)],
        lambda source, hashes, group: list(hashes),
        (FullAttention(1, 1), FullAttention(1, 1)),
        [[set(), set()]],
        [10],
    )
    assert [(run.group, run.blocks) for run in runs] == [(at, list(whole[:5])) for at in (0, 1)]


def test_a_chain_half_live_takes_the_other_half_along() -> None:
    wanted = [PlacedChain(chain("abcd"), 0, 0), PlacedChain(chain("abcd"), 0, 1)]
    held: list[list[Hashes]] = [[{*chain("ab")}], [set()]]
    near, far = fill(wanted, every, full(1), held, [9, 9])
    assert hashes_of(near) == [b"abc", b"abcd"]
    assert hashes_of(far) == [*chain("abcd")], "another replica lacks the first half"


def test_a_block_that_was_evicted_ends_its_chain() -> None:
    (blocks,) = fill(
        [PlacedChain(chain("abc"), 0, 0), PlacedChain(chain("b"), 0, 0)],
        lambda replica, hashes, group: [
            None if block_hash == b"ab" else block_hash for block_hash in hashes
        ],
        full(1),
        [[set()]],
        [9],
    )
    assert hashes_of(blocks) == [b"a", b"b"]


# -------------------------------------------------------------------- memory


def test_a_request_takes_the_place_of_the_chain_that_it_continues() -> None:
    chains = Chains()
    for text in ("ab", "x", "abcd"):
        chains.arrived(chain(text))
        chains.ended(chain(text))
    assert chains.latest() == [chain("abcd"), chain("x")]
    chains.arrived(chain("xy"))
    assert chains.latest() == [chain("abcd")], "what lives is no chain"
    chains.ended(())
    chains.ended(chain("abce"))
    assert chains.latest() == [chain("abce"), chain("abcd")], "a part in common stays in both"
    chains.forget()
    assert chains.latest() == []


def test_the_least_recently_used_chains_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_BLOCKS", 6)
    chains = Chains()
    for text in ("abc", "xyz", "uvw"):
        chains.ended(chain(text))
    assert chains.latest() == [chain("uvw"), chain("xyz")]
    chains.ended(chain("xyzz"))
    assert chains.latest() == [chain("xyzz")]


@given(st.lists(st.tuples(st.booleans(), TEXTS), max_size=30))
def test_memory_is_of_the_chains_in_it(events: list[tuple[bool, str]]) -> None:
    chains = Chains()
    for ends, text in events:
        (chains.ended if ends else chains.arrived)(chain(text))
        kept = chains.latest()
        assert chains._blocks == sum(map(len, kept))
        assert max(Counter(hashes[-1] for hashes in kept).values(), default=1) == 1
