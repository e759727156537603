# docs/faults.md against the tests: every row has a test with its number, in every file that the table names.
# Touches the files of the checkout.
"""If a test is renamed or removed, its row must not stay in the table without a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"^(?:(?:async )?def test_|TEST\()rows?_(\w+)", re.MULTILINE)
UNNUMBERED = {"tests/ranks/test_faults.py"}  # a separate matrix, of static jobs


def rows_of(name: str) -> set[int]:
    """The rows in a test's name: `5_`, `1_and_3_`, `1_to_5_22_and_24_`.

    >>> sorted(rows_of("1_to_3_22_and_24_random_faults_2"))
    [1, 2, 3, 22, 24]
    """
    found: list[int] = []
    reach = False
    for word in name.split("_"):
        if word.isdigit():
            found += range(found[-1] + 1, int(word) + 1) if reach and found else [int(word)]
        elif word not in ("and", "to"):
            break
        reach = word == "to"
    return set(found)


def test_names_of_tests_are_read_as_they_are_written() -> None:
    assert rows_of("1_to_3_22_and_24_random_faults_2") == {1, 2, 3, 22, 24}
    assert rows_of("04_a_host") == {4} and rows_of("23_a_drain") == {23} and rows_of("a_2") == set()


def test_every_row_has_a_test_with_its_number() -> None:
    wrong, rows = [], set()
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or not cells[1][:1].isdigit():
            continue
        numbers = {int(number) for number in cells[1].split(",")}
        rows |= numbers
        carried: set[int] = set()
        for path in re.findall(r"`(tests/[^`]+)`", cells[4]):
            here = {row for name in NAME.findall((ROOT / path).read_text()) for row in rows_of(name)}
            carried |= here
            if not here & numbers and path not in UNNUMBERED:
                wrong.append(f"{path} has no test of row {cells[1]}")
        wrong += [f"row {number} has no test that carries its number" for number in numbers - carried]
    assert not wrong and rows == set(range(1, 39)) - {27, 34, 36} | {40}, wrong
