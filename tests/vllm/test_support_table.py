"""The table of what the tests cover is the one that they make."""

from __future__ import annotations

from tests.support.support_table import listed, table


def test_the_limits_list_what_the_tests_cover() -> None:
    """`python -m tests.support.support_table` writes it anew."""
    assert listed()[0].splitlines() == table()


def test_what_is_tested_where_is_told_apart() -> None:
    """Of a model whose tests are few: on every change, at night, in an environment of their own."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table()]
    (gemma,) = [
        dict(zip(rows[0], row, strict=True)) for row in rows if row[0] == "Gemma3ForCausalLM"
    ]
    assert (gemma["weights"], gemma["live switch"], gemma["storm"]) == ("yes", "2", "2")
    assert (gemma["Model Runner V2"], gemma["VeRL"]) == ("(2)", "yes")
