"""Where tests are sought: not in integrations whose package is not installed."""

from importlib.util import find_spec
from pathlib import Path

_FOLDER = Path("src", "recoup", "integrations")

collect_ignore = [
    str(_FOLDER / f"{name}.py")
    for name in ("accelerate", "lightning", "transformers")
    if find_spec(name) is None
]
