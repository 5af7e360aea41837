"""The long description of the wheel: the README with addresses in place of paths.

A package index shows the README without the repository around it, where a relative
picture or link leads nowhere.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def with_addresses(text: str, repository: str) -> str:
    """Return Markdown whose relative links and pictures point into a repository.

    Examples:
        >>> with_addresses("![a](b.svg) [c](d.md) [e](https://f)", "https://r")
        '![a](https://r/raw/main/b.svg) [c](https://r/blob/main/d.md) [e](https://f)'
    """

    def whole(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        return f"{mark}[{words}]({repository}/{'raw' if mark else 'blob'}/main/{path})"

    return _LINK.sub(whole, text)


class Readme(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the project's metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata["urls"]["Repository"]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_addresses(text, repository),
        }
