"""Small models and data for real trainings with the frameworks of others."""

# pyright: reportMissingImports=false

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


def tiny_llama() -> nn.Module:
    """Return a small Llama of transformers with the same parameters each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


class Tokens(Dataset[Any]):
    """Sentences of one length, made when they are read: no memory of a step."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [(index * 7 + place * place) % 64 for place in range(48)]
        return {"input_ids": tokens, "labels": tokens}


def small_stack() -> nn.Module:
    """Return layers with dropout and normalisation, the same each time."""
    torch.manual_seed(11)
    return nn.Sequential(*(_layer() for _ in range(4)))


def _layer() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 16)
    )


class Rows(Dataset[Any]):
    """Pairs of vectors, made when they are read: no memory of a step."""

    def __init__(self, count: int = 1600) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if index >= self._count:
            raise IndexError
        row = torch.arange(16.0) * (index % 17) / 16
        return row.sin(), row.cos()
