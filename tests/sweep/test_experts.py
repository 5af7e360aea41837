"""Mixtures of experts of transformers against their own checkpointing.

Layer by layer no more bytes are held between forward and backward, the peak is no
higher, and a budget of that peak is one that `fit` can hold.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup import checkpoint_module
from tests.support.counting import Peak
from tests.support.zoo import Entry, result_of

pytestmark = pytest.mark.sweep

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "head_dim": 16,
            "sliding_window": 16,
            "attn_implementation": "eager",
        },
    ),
}
WAYS = ["eager", "grouped_mm", "batched_mm"]


def built(name: str, way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind, sizes = MODELS[name]
    config_class = getattr(transformers, f"{kind}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = config_class(**SIZES, **sizes, experts_implementation=way, use_cache=False)
    torch.manual_seed(0)
    return getattr(import_module("transformers"), f"{kind}ForCausalLM")(config).train()


def inputs() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def checkpoint_as_its_authors_do(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def checkpoint_layers(model: Any) -> None:
    layers = model.model.layers
    for number in range(len(layers)):
        layers[number] = checkpoint_module(layers[number])


def trained(
    model: nn.Module, change: Callable[[Any], None]
) -> tuple[int, int, list[Tensor | None]]:
    """Return the bytes held after forward, the peak and the gradients of a step."""
    change(model)
    peak, held_bytes = Peak(), 0
    for _ in range(2):  # the first step is verified, and some models change in it
        model.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        peak = Peak()
        with peak:
            loss = model(**inputs()).loss
            held_bytes = peak.total_bytes
            loss.backward()
    return held_bytes, peak.peak_bytes, [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # of transformers, when models are built
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_hold_no_more_than_their_own_checkpointing(name: str, way: str):
    make = partial(built, name, way)
    *_, expected = trained(make(), lambda model: None)
    own_bytes, own_peak, _ = trained(make(), checkpoint_as_its_authors_do)
    held_bytes, peak_bytes, gradients = trained(make(), checkpoint_layers)
    assert held_bytes <= own_bytes
    assert peak_bytes <= own_peak
    for found, plain in zip(gradients, expected, strict=True):
        assert found is plain or (
            found is not None and plain is not None and torch.equal(found, plain)
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_their_own_checkpointing_is_a_budget_that_holds(
    name: str, way: str
):
    built(name, way)  # skips without transformers
    entry = Entry(
        name,
        "transformers",
        partial(built, name, way),
        inputs,
        checkpoint_as_its_authors_do,
    )
    found = result_of(entry)
    assert found.floor_bytes <= found.budget_bytes, "it is feasible"
    assert 0 < found.peak_bytes <= found.budget_bytes
    assert found.differences == ()
