"""Numbers of an earlier process are used again, whatever is wrong with their file."""

import os
import subprocess
import sys

import pytest
import torch

from recoup.backend.compiler.stored_numbers import StoredNumbers, stored_for


def never():
    raise AssertionError("known numbers are not found again")


def test_a_number_is_found_once_for_all_processes(tmp_path):
    path = tmp_path / "new" / "times.jsonl"
    assert StoredNumbers(path).number("a", lambda: 0.1) == 0.1
    again = StoredNumbers(path)
    assert again.number("a", never) == 0.1
    assert again.number("b", lambda: 2.0) == 2.0
    assert StoredNumbers(path).number("b", never) == 2.0


def test_of_two_processes_the_first_counts(tmp_path):
    path = tmp_path / "times.jsonl"
    first, second = StoredNumbers(path), StoredNumbers(path)
    first.number("a", lambda: 1.0)
    assert second.number("a", lambda: 2.0) == 2.0
    assert StoredNumbers(path).number("a", never) == 1.0


@pytest.mark.parametrize(
    "text", ["", "[1", "[1, 2]\n", '["a", "b"]\n', '["a", NaN]\n', "{}\n", "\xff\xfe"]
)
def test_lines_that_are_no_numbers_are_ignored(tmp_path, text):
    path = tmp_path / "times.jsonl"
    path.write_bytes(text.encode("latin-1"))
    assert StoredNumbers(path).number("a", lambda: 3.0) == 3.0


def test_where_nothing_can_be_written_numbers_are_known_in_the_process(tmp_path):
    path = tmp_path / "a file, no folder"
    path.touch()
    times = StoredNumbers(path / "times.jsonl")
    assert times.number("a", lambda: 1.0) == times.number("a", never) == 1.0


def test_eager_kernels_have_no_caches_to_be_found_again():
    assert stored_for(torch.device("cpu"), "exact")._path is None


@pytest.mark.slow
@pytest.mark.parametrize("disabled", [False, True])
def test_the_file_is_in_the_folder_of_the_compilers_caches(tmp_path, disabled):
    program = (
        "import torch; from recoup.backend.compiler.stored_numbers import stored_for; "
        "stored_for(torch.device('cpu'), 'inductor').number('a', lambda: 1.0)"
    )
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if disabled:
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, **environment}
    )
    assert len(list(tmp_path.glob("recoup/numbers-*.jsonl"))) == (not disabled)
