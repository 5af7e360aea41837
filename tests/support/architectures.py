"""Tiny models of `transformers`, built from configuration with random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.operators import Case, run_case
from tests.support.twin import Region, Step
from tests.support.variants import differentiable, fixed_weights, records

# Configurations name the same things differently; each takes the names it knows.
NAMES_BY_SIZE = {
    2: """
        decoder_attention_heads decoder_layers decoder_num_attention_heads
        decoder_num_hidden_layers encoder_attention_heads encoder_layers n_head n_heads
        n_layer n_layers n_routed_experts num_attention_heads num_decoder_layers
        num_experts num_heads num_hidden_layers num_key_value_heads num_layers
        num_local_experts
    """,
    1: "num_experts_per_tok",
    4: "qk_nope_head_dim qk_rope_head_dim rotary_dim state_size",
    8: "d_kv head_dim kv_lora_rank q_lora_rank v_head_dim",
    16: """
        d_model decoder_hidden_size dim emb_dim embedding_size hidden_size
        moe_intermediate_size n_embd shared_expert_intermediate_size
        word_embed_proj_dim
    """,
    32: """
        d_ff decoder_ffn_dim decoder_intermediate_size dff encoder_ffn_dim ffn_dim
        hidden_dim intermediate_size n_inner
    """,
    64: "max_position_embeddings n_ctx n_positions vocab_size",
}
SIZES = {name: size for size, text in NAMES_BY_SIZE.items() for name in text.split()}
TOKENS: dict[str, Any] = {
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IMAGES: dict[str, Any] = {"image_size": 16, "num_channels": 3, "patch_size": 8}
SOUNDS: dict[str, Any] = {
    "codevector_dim": 8,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 4],
    "num_conv_pos_embedding_groups": 2,
    "num_conv_pos_embeddings": 4,
    "num_feat_extract_layers": 2,
    "proj_codevector_dim": 8,
}


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (2, 8), generator=generator)}


def labelled_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(generator)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone()}


def image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


def video(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 4, 3, 16, 16, generator=generator)}


def sound(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400, generator=generator)}


def spectrogram(generator: torch.Generator) -> dict[str, Tensor]:
    features = torch.randn(2, 8, 40, generator=generator)
    return {
        "input_features": features,
        "labels": torch.randint(3, 60, (2, 8), generator=generator),
    }


def series(generator: torch.Generator) -> dict[str, Tensor]:
    return {"past_values": torch.randn(2, 32, 2, generator=generator)}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a family of architectures is given and asked for."""

    auto_class: str
    inputs: Callable[[torch.Generator], dict[str, Tensor]]
    settings: dict[str, Any]


ENCODER = Kind("AutoModel", tokens, TOKENS)
DECODER = Kind("AutoModelForCausalLM", labelled_tokens, TOKENS)
BOTH = Kind("AutoModelForSeq2SeqLM", labelled_tokens, TOKENS)
IMAGE = Kind("AutoModel", image, IMAGES)
VIDEO = Kind("AutoModel", video, IMAGES)
SOUND = Kind("AutoModel", sound, SOUNDS)
SPEECH = Kind("AutoModelForSpeechSeq2Seq", spectrogram, TOKENS)
SERIES = Kind("AutoModel", series, {})


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of `transformers`, with what is particular to it."""

    name: str
    kind: Kind
    own: dict[str, Any] = field(default_factory=dict)

    def build(self, *, dropout: float) -> nn.Module:
        """Make the model with fresh random weights, in training mode."""
        # By name: type checkers have it only where it is installed.
        transformers = import_module("transformers")
        default = transformers.AutoConfig.for_model(self.name)
        known = {k: v for k, v in SIZES.items() if hasattr(default, k)}
        settings = known | self.kind.settings | self.own
        settings |= _dropouts(default, dropout)
        config = transformers.AutoConfig.for_model(self.name, **settings)
        model = getattr(transformers, self.kind.auto_class).from_config(config)
        return model.train()


def architecture_step(architecture: Architecture, *, dropout: float) -> Step:
    """Run a whole model in one scope, and differentiate it."""

    def step(region: Region) -> dict[str, Any]:
        model = architecture.build(dropout=dropout)
        inputs = architecture.kind.inputs(torch.Generator().manual_seed(3))
        with region(architecture.name):
            result = model(**inputs)
        values = dict(result.items())
        # The cache would be an output too, but no tree of tensors.
        values.pop("past_key_values", None)
        outputs = differentiable(values)
        torch.autograd.backward(outputs, fixed_weights(outputs))
        return {
            "output": records(values),
            "gradient": {name: p.grad for name, p in model.named_parameters()},
            "buffer": {name: b.clone() for name, b in model.named_buffers()},
        }

    return step


def architecture_cases(architecture: Architecture, region: Region) -> Iterator[Case]:
    """Judge one architecture with dropout and without."""
    for dropout in (0.0, 0.2):
        yield run_case(
            architecture.name,
            torch.float32,
            f"dropout {dropout}",
            step=architecture_step(architecture, dropout=dropout),
            region=region,
        )


def _dropouts(config: Any, probability: float) -> dict[str, float]:
    """Set every probability of dropping something, whatever it is called.

    Dropping whole layers stays off: with two of them little would be left.
    """
    return {
        name: 0.0 if "layer" in name else probability
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, float)
    }


def _all(kind: Kind, names: str) -> list[Architecture]:
    return [Architecture(name, kind) for name in names.split()]


STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
ARCHITECTURES = [
    *_all(
        ENCODER,
        "albert bert big_bird convbert deberta deberta-v2 distilbert electra esm "
        "flaubert fnet ibert longformer mobilebert modernbert mpnet mra nomic_bert "
        "nystromformer rembert roberta roformer splinter squeezebert tapas xlm yoso",
    ),
    *_all(
        DECODER,
        "biogpt bloom cohere ctrl deepseek_v2 ernie4_5_moe gemma gemma2 glm gpt2 "
        "gpt_bigcode gpt_neox gpt_oss gptj granitemoe lfm2 llama mamba minimax mistral "
        "mixtral mpt olmo olmoe opt persimmon phi phi3 qwen2_moe qwen3 recurrent_gemma "
        "rwkv stablelm starcoder2 xglm",
    ),
    Architecture("mamba2", DECODER, {"n_groups": 1, "num_heads": 4, "head_dim": 8}),
    *_all(
        BOTH,
        "bart blenderbot longt5 m2m_100 marian mbart nllb-moe pegasus "
        "switch_transformers t5 umt5",
    ),
    *_all(IMAGE, "beit deit dinov2 dpt ijepa sapiens2 vit vit_mae vit_msn"),
    Architecture("convnext", IMAGE, STAGES | {"num_stages": 2, "patch_size": 4}),
    Architecture("focalnet", IMAGE, {"embed_dim": 8, "depths": [1, 1]}),
    Architecture("regnet", IMAGE, STAGES),
    Architecture("resnet", IMAGE, STAGES),
    Architecture("timesformer", VIDEO, {"num_frames": 4}),
    *_all(SOUND, "data2vec-audio hubert sew wav2vec2 wavlm"),
    Architecture("whisper", SPEECH, {"num_mel_bins": 8, "max_source_positions": 20}),
    Architecture("patchtst", SERIES, {"context_length": 32, "num_input_channels": 2}),
]
