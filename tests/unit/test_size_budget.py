"""The size budget reports what is over it and accepts what is exactly at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.size_budget import problems_of


def write_functions(path: Path, lengths: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bodies = [f"def f{i}():\n" + "    x = 1\n" * (length - 1) for i, length in enumerate(lengths)]
    path.write_text("".join(bodies))


def test_accepts_what_is_exactly_at_the_limits(tmp_path: Path) -> None:
    write_functions(tmp_path / "zorse_ds" / "a.py", [50] + [25] * 9)
    (tmp_path / "zorse_ds" / "b.py").write_text("x = 1\n" * 350)
    assert problems_of(tmp_path) == []


def test_names_a_long_file_and_a_long_function(tmp_path: Path) -> None:
    write_functions(tmp_path / "tests" / "a.py", [51])
    (tmp_path / "tests" / "b.py").write_text("x = 1\n" * 351)
    assert problems_of(tmp_path) == [
        "tests/a.py:1: f0 has 51 lines; at most 50",
        "tests/b.py: 351 lines; at most 350",
    ]


@pytest.mark.parametrize(("folder", "num_problems"), [("zorse_ds", 3), ("tests", 0)])
def test_judges_the_percentile_outside_the_tests_only(
    tmp_path: Path, folder: str, num_problems: int
) -> None:
    write_functions(tmp_path / folder / "a.py", [26, 26] + [5] * 8)
    assert len(problems_of(tmp_path)) == num_problems
