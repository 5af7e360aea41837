"""The wheel's metadata: addresses, and a description that a package index can show."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
URLS = PROJECT["project"]["urls"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_LINK = re.compile(r"\]\(([^)]+)\)")


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}: (\S+)$", SITE, flags=re.MULTILINE)
    return value


def test_the_addresses_of_the_project_are_there_and_those_of_the_site():
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= {*URLS}
    assert all(re.fullmatch(r"https://[^\s]+", url) for url in URLS.values())
    assert setting("repo_url") == URLS["Repository"]
    assert setting("site_url").rstrip("/") == URLS["Documentation"]
    assert URLS["Changelog"] == f"{setting('site_url')}changelog/"


def check_description(text: str) -> None:
    links = _LINK.findall(text)
    assert len(links) == len(_LINK.findall(README)) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    picture = f"{URLS['Repository']}/raw/main/docs/images/memory.svg"
    assert f"]({picture})" in text


def test_a_description_with_a_relative_link_is_found():
    with pytest.raises(AssertionError):
        check_description(README)


@pytest.mark.slow
def test_a_built_wheel_says_all_of_that(tmp_path):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: a build would need the network")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith("/METADATA"))
        metadata = Parser().parsestr(packed.read(name).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Requires-Python"] == ">=3.11"
    found = dict(url.split(", ") for url in metadata.get_all("Project-URL") or ())
    assert found == URLS
    check_description(str(metadata.get_payload()))
