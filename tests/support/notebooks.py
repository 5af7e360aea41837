"""Run a notebook: its cells one after the other, with the outputs that Jupyter shows.

    python -m tests.support.notebooks docs/notebooks/*.ipynb

writes the outputs into the files.
"""

import ast
import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def executed(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a run from top to bottom."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    cells: list[Cell] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count = 1 + sum(c["cell_type"] == "code" for c in cells)
            found = outputs_of("".join(cell["source"]), variables, count)
            cell = {**cell, "outputs": found, "execution_count": count}
        cells.append(cell)
    return {**notebook, "cells": cells}


def outputs_of(source: str, variables: dict[str, Any], count: int) -> list[Cell]:
    """What a cell prints, and its last expression as text and HTML."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), variables)
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), "cell", "eval")
            value = eval(code, variables)
    found: list[Cell] = []
    if text := printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        found.append(
            {
                "data": data,
                "execution_count": count,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return found


def words_of(output: Mapping[str, Any]) -> tuple[list[str], str]:
    """The kinds of an output and its words; of a result only what it is.

    Amounts, and the plan that is the fastest, differ from run to run.
    """
    data = output.get("data", {})
    if data:
        return sorted(data), re.findall(r"\w*", "".join(data["text/plain"]))[0]
    amount = r"[-+]?\d[\d.]*(e-?\d+)?(%| ?([KMG]iB|B|[mun]?s)\b)?"
    return [], " ".join(re.sub(amount, "#", "".join(output["text"])).split())


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        given = json.loads(Path(name).read_text(encoding="utf-8"))
        text = json.dumps(executed(given), indent=1, ensure_ascii=False)
        Path(name).write_text(text + "\n", encoding="utf-8")
