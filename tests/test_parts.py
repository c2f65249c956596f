"""The parts into which CI divides the slow tests."""

import conftest
import pytest

NAMES = {f"test_{letter}.py" for letter in "abcdefg"}


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_every_file_is_in_one_part(count):
    parts = [conftest.files_of_part(NAMES, f"{number + 1}/{count}") for number in range(count)]
    assert set().union(*parts) == NAMES
    assert sum(map(len, parts)) == len(NAMES)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["", "1", "0/4", "5/4", "a/4", "1/b", "-1/4", "1/0"])
def test_invalid_parts(part):
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        conftest.files_of_part(NAMES, part)
