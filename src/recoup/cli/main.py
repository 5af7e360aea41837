"""The command `recoup`: parses arguments, runs a command, prints errors as a sentence.

Nothing here imports torch, so help and usage errors are fast.
"""

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import typer

from recoup.cli import commands
from recoup.cli.output_files import as_json
from recoup.cli.statuses import (
    DONE,
    FAILED,
    INFEASIBLE,
    INTERRUPTED,
    MEANINGS,
    USAGE,
    CommandError,
)
from recoup.errors import InfeasibleError, PlanError, RecoupError, UsageError

_EPILOGUE = "Exit status: " + "; ".join(
    f"{status} {meaning}" for status, meaning in MEANINGS.items()
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end with its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(given))


def run(arguments: Sequence[str]) -> int:
    """Run a command; return its exit status.

    Examples:
        >>> run(["explain", "missing.json"])
        5
    """
    debug = "--debug" in arguments
    try:
        # Without a command it prints the list of commands.
        returned = _application()(list(arguments) or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        returned = INTERRUPTED
    except Exception as error:  # noqa: BLE001 (any error ends as one sentence)
        if debug:
            traceback.print_exc()
        return _complain(_sentence(error), _status(error), arguments)
    if returned == INTERRUPTED:
        return _complain("interrupted", INTERRUPTED, arguments)
    return returned if isinstance(returned, int) else DONE


def _application() -> typer.Typer:
    application = typer.Typer(
        name="recoup",
        help="Make PyTorch training fit in the memory you have.",
        epilog=_EPILOGUE,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    application.callback()(commands.options)
    for command in commands.COMMANDS:
        application.command()(command)
    return application


def _status(error: Exception) -> int:
    match error:
        case CommandError():
            return error.status
        case InfeasibleError():
            return INFEASIBLE
        case UsageError() | PlanError():
            return USAGE
        case _:
            return USAGE if _complaint(error) else FAILED


def _sentence(error: Exception) -> str:
    if isinstance(error, RecoupError):
        return str(error)
    if complaint := _complaint(error):
        return complaint
    if _is_out_of_memory(error):
        return (
            "the device has too little memory even for one measured step; try a "
            "smaller batch, or free other memory on it"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return (
        f"{type(error).__name__}: {first}. This may be the fault of recoup; run it "
        "again with --debug to see where"
    )


def _complaint(error: Exception) -> str:
    """Return the message of typer's usage errors; their class names vary."""
    words = getattr(error, "format_message", None)
    return str(words()) if words is not None else ""


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:
        return False
    return isinstance(error, import_module("torch").OutOfMemoryError)


def _complain(message: str, status: int, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        print(as_json({"error": message, "status": status}))
    print(f"recoup: {message.rstrip('.')}.", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
