"""The text that the demonstration trains on, as numbers."""

from importlib import resources

import torch
from torch import Tensor


def read_text() -> str:
    """Return the text to train on: sonnets of Shakespeare's.

    Examples:
        >>> read_text().splitlines()[2]
        'From fairest creatures we desire increase,'
    """
    folder = resources.files("recoup.cli").joinpath("texts")
    return folder.joinpath("sonnets.txt").read_text(encoding="utf-8")


def encode(text: str) -> Tensor:
    """Number the characters of a text by their place in its alphabet.

    Examples:
        >>> encode("abba")
        tensor([0, 1, 1, 0])
    """
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text])
