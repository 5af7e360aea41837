"""What MkDocs does not do by itself: pages made of other files of the repository.

The changelog and the notebooks are pages of the site. A link to a file outside of
`docs`, which serves those who read in a clone, becomes an address in the repository.
Examples with prompts, which the tests run, become code that can be pasted.
"""

import doctest
import json
import posixpath
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_BLANK = re.compile(r"\n\s*\n")
_NOTEBOOK = re.compile(r"\]\(([^):]*notebooks/[\w-]+)\.ipynb\)")
_PROMPTS = re.compile(r"^```\n(>>> .*?)^```$", re.DOTALL | re.MULTILINE)
_OUTWARDS = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the changelog and the notebooks."""
    root = Path(config.config_file_path).parent
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=text))
    for notebook in sorted((root / "docs").rglob("*.ipynb")):
        name = notebook.relative_to(root / "docs").as_posix()
        found = json.loads(notebook.read_text(encoding="utf-8"))
        page = f"{page_of(found)}\n\n[Download this notebook]({notebook.name})\n"
        path = name.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, path, content=page))
    return files


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turn links to files outside of `docs` into addresses in the repository.

    A link to a notebook leads to its page.
    """
    del files
    root = Path(config.config_file_path).parent
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def address(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        if not (root / path).exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which is missing")
        return f"]({config.repo_url}/blob/main/{path}"

    markdown = _PROMPTS.sub(lambda found: pasteable(found[1]), markdown)
    return _OUTWARDS.sub(address, _NOTEBOOK.sub(r"](\1.md)", markdown))


def pasteable(examples: str) -> str:
    r"""Return examples with prompts as blocks of code, and of what they print.

    Examples:
        >>> print(pasteable(">>> x = 1\n>>> x + 1\n2\n"))
        ```python
        x = 1
        x + 1
        ```
        <BLANKLINE>
        ```text
        2
        ```
    """
    blocks: list[str] = []
    code = ""
    for example in doctest.DocTestParser().get_examples(examples):
        code += re.sub(r"  # doctest: .*", "", example.source)
        if example.want:
            want = example.want.replace("<BLANKLINE>", "")
            blocks += [f"```python\n{code}```", f"```text\n{want}```"]
            code = ""
    return "\n\n".join([*blocks, f"```python\n{code}```"] if code else blocks)


def page_of(notebook: Mapping[str, Any]) -> str:
    """Return a notebook as Markdown, with its outputs.

    Examples:
        >>> output = {"output_type": "stream", "text": ["2"]}
        >>> cell = {"cell_type": "code", "source": ["print(2)"], "outputs": [output]}
        >>> print(page_of({"cells": [cell]}))
        ```python
        print(2)
        ```
        <BLANKLINE>
        ```text
        2
        ```
    """
    blocks: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
        else:
            blocks.append(f"```python\n{source}\n```")
            blocks += map(_output, cell["outputs"])
    return "\n\n".join(blocks)


def _output(output: Mapping[str, Any]) -> str:
    data = output.get("data", {})
    if html := "".join(data.get("text/html", [])):
        # A blank line would end the piece of HTML.
        return f'<div class="output">{_BLANK.sub(chr(10), html)}</div>'
    text = "".join(data.get("text/plain", output.get("text", [])))
    return f"```text\n{text.rstrip()}\n```" if text else escape(str(output))
