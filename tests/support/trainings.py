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
