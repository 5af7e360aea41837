"""The documentation names every public name, lists pages that exist, and builds."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recoup

ROOT = Path(__file__).parents[1]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LISTED = re.findall(r": ([\w/-]+\.md)$", SETTINGS, flags=re.MULTILINE)
REFERENCE = "".join(
    page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md")
)


@pytest.mark.parametrize("name", recoup.__all__)
def test_a_public_name_has_its_place_in_the_reference(name):
    found = re.findall(rf"^::: recoup\.{name}$", REFERENCE, flags=re.MULTILINE)
    assert len(found) == 1, f"write '::: recoup.{name}' on one page of docs/reference"


def test_the_listed_pages_exist():
    assert len(LISTED) > 10
    for page in LISTED:
        assert (ROOT / "docs" / page).is_file(), page


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: `pip install recoup[docs]`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "reference" / "fit" / "index.html").is_file()
