from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.simulator.free_memory import FreeMemory


def test_what_was_freed_first_is_overwritten_first_and_its_end_first() -> None:
    memory = FreeMemory(10)
    memory.free(5, owner=1)
    memory.free(7, owner=2)
    memory.overwrite(12)
    assert memory.total == 10
    assert memory.take_back(1) == 3 and memory.take_back(1) == 0
    memory.overwrite(7)
    assert memory.take_back(2) == 0 and memory.total == 0


@given(st.lists(st.tuples(st.sampled_from("fotr"), st.integers(0, 30)), max_size=60))
def test_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    memory, free, left = FreeMemory(40), 40, {}
    for number, (what, tokens) in enumerate(steps):
        if what == "f":
            memory.free(tokens)
            free += tokens
        elif what == "o":
            free -= min(tokens, free)
            memory.overwrite(min(tokens, memory.total))
        elif what == "r":
            memory.free(tokens, owner=number)
            free, left[number] = free + tokens, tokens
        elif left:
            owner, most = left.popitem()
            back = memory.take_back(owner)
            assert 0 <= back <= most
            free -= back
        assert memory.total == free
