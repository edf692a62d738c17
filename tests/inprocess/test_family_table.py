"""`docs/families.md` says what the configurations say now."""

from __future__ import annotations

import pytest

from tools.families import TABLE, facts_of, families, lines_of_refusals

ROWS = {
    line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[1:-1]]
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
}


def test_all_families_are_listed() -> None:
    assert set(families()) < set(ROWS)


@pytest.mark.parametrize("name", families())
def test_its_row_is_current(name: str) -> None:
    facts = facts_of(name, families()[name])
    assert ROWS[name][:4] == facts.cells
    assert (ROWS[name][4] != "takes no `position_ids`") == facts.takes_positions
    assert float(ROWS[name][5]) < 1e-10


def test_refusals_are_current() -> None:
    text = TABLE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines_of_refusals() if line not in text] == []
