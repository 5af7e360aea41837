"""The classes of error: the base classes that catch them."""

import inspect

import pytest

from recoup import errors

ERRORS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__
]
REPLAY_ERRORS = ["ChangedTensorError", "MismatchError", "ClearedError", "CaptureError"]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_the_one_base_class(error):
    assert issubclass(error, errors.RecoupError)


# Errors that build their own message take no other.
GIVEN = [error for error in ERRORS if error is not errors.CheckpointIndexError]


@pytest.mark.parametrize("error", GIVEN)
def test_one_base_class_catches_every_error(error):
    with pytest.raises(errors.RecoupError, match="the message"):
        raise error("the message")


@pytest.mark.parametrize("name", REPLAY_ERRORS)
def test_replay_error_catches_every_kind_of_replay_failure(name):
    assert issubclass(getattr(errors, name), errors.ReplayError)


def test_code_that_expects_builtin_errors_catches_ours():
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.ReplayError, RuntimeError)
    assert issubclass(errors.UnsupportedError, RuntimeError)


def test_a_usage_error_is_not_a_replay_error():
    assert not issubclass(errors.UsageError, RuntimeError)
    assert not issubclass(errors.ReplayError, ValueError)


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_documents_when_it_is_raised(error):
    assert (error.__doc__ or "").strip()
