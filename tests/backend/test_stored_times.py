"""Times of an earlier process are used again, whatever is wrong with their file."""

import os
import subprocess
import sys

import pytest
import torch

from recoup.backend.compiler.stored_times import StoredTimes, times_of


def never():
    raise AssertionError("known times are not measured")


def test_a_time_is_measured_once_for_all_processes(tmp_path):
    path = tmp_path / "new" / "times.jsonl"
    assert StoredTimes(path).seconds("a", lambda: 0.1) == 0.1
    again = StoredTimes(path)
    assert again.seconds("a", never) == 0.1
    assert again.seconds("b", lambda: 2.0) == 2.0
    assert StoredTimes(path).seconds("b", never) == 2.0


def test_of_two_processes_the_first_counts(tmp_path):
    path = tmp_path / "times.jsonl"
    first, second = StoredTimes(path), StoredTimes(path)
    first.seconds("a", lambda: 1.0)
    assert second.seconds("a", lambda: 2.0) == 2.0
    assert StoredTimes(path).seconds("a", never) == 1.0


@pytest.mark.parametrize(
    "text", ["", "[1", "[1, 2]\n", '["a", "b"]\n', '["a", NaN]\n', "{}\n", "\xff\xfe"]
)
def test_lines_that_are_no_times_are_ignored(tmp_path, text):
    path = tmp_path / "times.jsonl"
    path.write_bytes(text.encode("latin-1"))
    assert StoredTimes(path).seconds("a", lambda: 3.0) == 3.0


def test_where_nothing_can_be_written_times_are_known_in_the_process(tmp_path):
    path = tmp_path / "a file, no folder"
    path.touch()
    times = StoredTimes(path / "times.jsonl")
    assert times.seconds("a", lambda: 1.0) == times.seconds("a", never) == 1.0


def test_eager_kernels_have_no_caches_to_be_found_again():
    assert times_of(torch.device("cpu"), "exact")._path is None


@pytest.mark.slow
@pytest.mark.parametrize("disabled", [False, True])
def test_the_file_is_in_the_folder_of_the_compilers_caches(tmp_path, disabled):
    program = (
        "import torch; from recoup.backend.compiler.stored_times import times_of; "
        "times_of(torch.device('cpu'), 'inductor').seconds('a', lambda: 1.0)"
    )
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if disabled:
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, **environment}
    )
    assert len(list(tmp_path.glob("recoup/times-*.jsonl"))) == (not disabled)
