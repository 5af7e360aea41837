"""Models nobody here wrote: transformers, PEFT and timm, from configuration.

Each has random weights, a size for an accelerator and one that a CPU runs in a second.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.cases import CASES as OUR_CASES
from recoup.backend.state.trees import map_leaves
from recoup.engine.applied.model_blocks import block_names, repeated_names

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def switch_of_transformers(model: Any, *, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def switch_of_timm(model: Any, *, on: bool) -> None:
    model.set_grad_checkpointing(on)


def checkpoint_by_hand(model: nn.Module, *, on: bool) -> None:
    """Put torch.utils.checkpoint around each repeated block, or take it off."""
    for name in repeated_names(model, block_names(model)):
        block: Any = model.get_submodule(name)
        if on:
            forward = block.forward
            block.forward = partial(checkpoint, forward, use_reentrant=False)
        else:
            del block.forward


def own_loss(output: Any, target: None) -> Tensor:
    """Return the loss that models of transformers compute themselves."""
    del target
    return output.loss


@dataclass(frozen=True)
class Case:
    """A model, the batch it is called with, and the switch that its users have.

    Attributes:
        model: The model.
        inputs: The keyword arguments of a call, or its only argument.
        target: The second argument of the loss.
        loss: Computes the loss.
        switch: Turns the model's own checkpointing on and off.
    """

    model: nn.Module
    inputs: Any
    target: Tensor | None = None
    loss: Callable[[Any, Any], Tensor] = own_loss
    switch: Callable[..., None] = switch_of_transformers

    def to(self, device: torch.device, dtype: torch.dtype) -> "Case":
        """Return the case on a device, its numbers in another format."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        return replace(
            self,
            model=self.model.to(device, dtype).train(),
            inputs=map_leaves(moved, self.inputs),
            target=None if self.target is None else self.target.to(device),
        )

    def run(self) -> None:
        """Run forward and backward."""
        called = self.inputs
        if isinstance(called, dict):
            output = self.model(**called)
        else:
            output = self.model(called)
        loss = self.loss(output, self.target)
        del output
        loss.backward()


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape)


def llama(*, large: bool) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = (2048, 5632, 22, 32, 4) if large else (128, 344, 4, 4, 2)
    config = LlamaConfig(
        vocab_size=32000 if large else 512,
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=sizes[2],
        num_attention_heads=sizes[3],
        num_key_value_heads=sizes[4],
        use_cache=False,
    )
    tokens = _tokens(config.vocab_size, 4, 2048 if large else 64)
    return Case(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens})


def qwen3_moe(*, large: bool) -> Case:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32000 if large else 512,
        hidden_size=1024 if large else 64,
        moe_intermediate_size=512 if large else 32,
        num_hidden_layers=12 if large else 3,
        num_attention_heads=16 if large else 4,
        num_key_value_heads=4 if large else 2,
        head_dim=64 if large else 16,
        num_experts=32 if large else 4,
        num_experts_per_tok=4 if large else 2,
        use_cache=False,
    )
    tokens = _tokens(config.vocab_size, 4, 2048 if large else 32)
    return Case(Qwen3MoeForCausalLM(config), {"input_ids": tokens, "labels": tokens})


def t5(*, large: bool) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024 if large else 64,
        d_ff=4096 if large else 128,
        d_kv=64 if large else 16,
        num_heads=16 if large else 4,
        num_layers=24 if large else 3,
        decoder_start_token_id=0,
        pad_token_id=0,
        vocab_size=32128 if large else 512,
        use_cache=False,
    )
    length = 512 if large else 32
    batch = 16 if large else 2
    source = _tokens(config.vocab_size, batch, length)
    target = _tokens(config.vocab_size, batch, length // 2)
    model = T5ForConditionalGeneration(config)
    return Case(model, {"input_ids": source, "labels": target})


def lora(*, large: bool) -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(use_cache=False)
    if not large:
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            use_cache=False,
        )
    base = LlamaForCausalLM(config).to(torch.bfloat16 if large else torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(base, LoraConfig(r=16, target_modules=targets))
    base.enable_input_require_grads()
    tokens = _tokens(config.vocab_size, 2, 2048 if large else 64)
    return Case(model, {"input_ids": tokens, "labels": tokens})


def whisper(*, large: bool) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width = 1024 if large else 64
    config = WhisperConfig(
        vocab_size=51865 if large else 512,
        d_model=width,
        encoder_layers=24 if large else 3,
        decoder_layers=24 if large else 3,
        encoder_attention_heads=width // 64 if large else 4,
        decoder_attention_heads=width // 64 if large else 4,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=1500 if large else 32,
        num_mel_bins=80,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    batch = 8 if large else 2
    sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    labels = _tokens(config.vocab_size, batch, 384 if large else 16)
    model = WhisperForConditionalGeneration(config)
    return Case(model, {"input_features": sound, "labels": labels})


def timm_model(name: str, batch: int, size: int = 224) -> Callable[..., Case]:
    """Return what makes a model of timm, for an accelerator or a CPU."""

    def make(*, large: bool) -> Case:
        import timm

        model = timm.create_model(name, num_classes=1000 if large else 10)
        side = size if large else max(64, size // 4)
        if not large and "img_size" in signature(type(model).__init__).parameters:
            side = size
        rows = batch if large else 2
        images = torch.randn(rows, 3, side, side)
        if large:
            images = images.contiguous(memory_format=torch.channels_last)
            model = model.to(memory_format=torch.channels_last)
        target = torch.randint(10, (rows,))
        return Case(model, images, target, cross_entropy, switch_of_timm)

    return make


def ours(name: str) -> Callable[..., Case]:
    """Return what makes a model of our own, checkpointed by hand."""

    def make(*, large: bool) -> Case:
        case, scale = OUR_CASES[name], "large" if large else "tiny"
        inputs, target = case.feed(scale)
        return Case(case.make(scale), inputs, target, case.loss, checkpoint_by_hand)

    return make


CASES: dict[str, Callable[..., Case]] = {
    "llama": llama,
    "qwen3-moe": qwen3_moe,
    "t5": t5,
    "lora": lora,
    "whisper": whisper,
    "swin": timm_model("swin_base_patch4_window7_224", 128),
    "convnext": timm_model("convnext_large", 96),
    "maxvit": timm_model("maxvit_tiny_tf_224", 96),
    "vit": timm_model("vit_large_patch16_224", 128),
    "resnext": timm_model("resnext101_32x8d", 128),
    "gpt": ours("gpt"),
    "u-net": ours("u-net"),
    "resnet-152": ours("resnet-152"),
}


def build(name: str, device: torch.device, *, large: bool) -> Case:
    """Return a case on its device, always with the same parameters and batch.

    Drawn on the device: a CPU takes ten times as long for billions of parameters.
    """
    torch.manual_seed(0)
    with device:
        case = CASES[name](large=large)
    return case.to(device, torch.bfloat16 if large else torch.float32)
