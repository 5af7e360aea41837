"""Hugging Face models against the switch their users have, at equal measured peak.

For each model: the eager step, the model's own gradient checkpointing, its layers
compiled with torch's `activation_memory_budget`, and recoup: a region per layer, and
`fit` at the peak of the model's own checkpointing and at shares of the eager peak, with
each executor; `fit` by Inductor also at the measured peak of each of torch's budgets,
right after it. The eager step is measured once more at the end, to show the drift. No
row takes longer than a limit. Models have random weights; nothing is downloaded.

    python -m benchmarks.cases.hugging_face --models llama --limit 240
"""

import argparse
import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import recoup
from benchmarks.harness import Row, device_at_hand, mark, parsed, publish, synchronize
from recoup.backend.memory.meters import interval_meter
from recoup.engine.applied.model_blocks import block_names, repeated_names
from recoup.fitting.compiled_fit import CompiledFit

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass
class Case:
    """A model with the batch that it is called with."""

    model: nn.Module
    batch: dict[str, torch.Tensor]


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
    with torch.device("cuda" if large else "cpu"):
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


CASES = {
    "llama": llama,
    "qwen3-moe": qwen3_moe,
    "t5": t5,
    "lora": lora,
    "whisper": whisper,
}


class OutOfTimeError(Exception):
    """A row took longer than its limit."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block after some seconds; 0: never."""

    def stop(*_: object) -> None:
        raise OutOfTimeError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """One model on the device, and how its step is measured."""

    def __init__(self, name: str, device: torch.device, *, steps: int) -> None:
        large = device.type != "cpu"
        torch.manual_seed(0)
        case = CASES[name](large=large)
        self.device = device
        self.steps = steps if large else 2
        self.model = case.model.to(device, torch.bfloat16 if large else torch.float32)
        self.model.train()
        dtype = torch.bfloat16 if large else torch.float32
        self.batch = {
            key: value.to(device, dtype if value.is_floating_point() else None)
            for key, value in case.batch.items()
        }
        self.blocks = repeated_names(self.model, block_names(self.model))

    def step(self) -> None:
        self.model(**self.batch).loss.backward()
        self.model.zero_grad(set_to_none=True)

    def measure(self) -> dict[str, Any]:
        """Return the peak, and the time of steps in a row, after two that warm up."""
        for _ in range(3):
            self.step()
        gc.collect()
        synchronize(self.device)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
            self.step()
            synchronize(self.device)
            peak = torch.accelerator.max_memory_allocated()
        else:
            with interval_meter(self.device) as meter:
                self.step()
            held = [*self.model.parameters(), *self.batch.values()]
            peak = meter.peak_bytes + sum(tensor.nbytes for tensor in held)
        times, hosts = [], []
        for _ in range(3):
            since = mark(self.device)
            begun = time.perf_counter()
            for _ in range(self.steps):
                self.step()
            hosts.append((time.perf_counter() - begun) / self.steps)
            times.append(since() / self.steps)
        return {
            "ms": round(1e3 * statistics.median(times), 1),
            "peak GiB": round(peak / 2**30, 3),
            "host ms": round(1e3 * statistics.median(hosts), 1),
            "peak bytes": peak,
        }


@contextmanager
def own_checkpointing(bench: Bench) -> Iterator[None]:
    bench.model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        bench.model.gradient_checkpointing_disable()


@contextmanager
def knob(bench: Bench, budget: float) -> Iterator[None]:
    """Compile each layer by itself with torch's own budget."""
    from torch._functorch import config

    torch.compiler.reset()
    blocks = [bench.model.get_submodule(name) for name in bench.blocks]
    with config.patch(activation_memory_budget=budget):
        for block in blocks:
            block.compile(dynamic=False)
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None  # noqa: SLF001 (no other way back)
    torch.compiler.reset()


@contextmanager
def per_layer(bench: Bench) -> Iterator[None]:
    for name in bench.blocks:
        recoup.checkpoint_module(bench.model.get_submodule(name))
    try:
        yield
    finally:
        for name in bench.blocks:
            recoup.uncheckpoint_module(bench.model.get_submodule(name))


@contextmanager
def fitted(bench: Bench, budget: int, executor: str | None) -> Iterator[str]:
    compile = executor or False  # noqa: A001
    _, report = recoup.fit(
        bench.model, bench.batch, budget, progress=False, compile=compile
    )
    text = (
        f"fit {report.total_seconds:.1f} s, predicted "
        f"{report.predicted_peak_bytes / 2**30:.2f} GiB "
        f"{1e3 * report.predicted_seconds:.0f} ms"
    )
    if isinstance(report, CompiledFit):
        text += f", gradients {report.difference:.1e} (eager twice {report.noise:.1e})"
        text += ", other random numbers" if report.draws_otherwise else ""
        text += f", {len(report.eager)} blocks not compiled" if report.eager else ""
    try:
        yield text
    finally:
        report.remove()


def rows_of(
    name: str, device: torch.device, options: argparse.Namespace
) -> Iterator[Row]:
    bench = Bench(name, device, steps=options.steps)

    def row(contender: str, around: Callable[[], Any]) -> Row:
        found: dict[str, Any] = {"model": name, "contender": contender}
        try:
            with time_limit(options.limit), around() as text:
                found |= bench.measure()
            found["remark"] = text if isinstance(text, str) else ""
        except Exception as error:  # noqa: BLE001 (a row of its own)
            found["remark"] = f"{type(error).__name__}: {error!s:.200}"
        bench.model.zero_grad(set_to_none=True)
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        print(found, flush=True)
        return found

    @contextmanager
    def eager() -> Iterator[None]:
        yield

    first = row("eager", eager)
    yield first
    own = row("own checkpointing", lambda: own_checkpointing(bench))
    yield own
    yield row("recoup, a region per layer", lambda: per_layer(bench))
    peaks = {"own checkpointing": own.get("peak bytes", 0)}
    for share in options.shares:
        peaks[f"{share:.0%}"] = int(first.get("peak bytes", 0) * share)
    for executor in options.executors:
        for label, budget in peaks.items():
            kind = None if executor == "eager" else executor
            yield row(
                f"fit ({executor}) at {label}",
                lambda budget=budget, kind=kind: fitted(bench, budget, kind),
            )
    for share in options.knobs:
        found = row(f"torch knob {share}", lambda share=share: knob(bench, share))
        yield found
        if "inductor" in options.executors and "peak bytes" in found:
            budget: Any = found["peak bytes"]
            yield row(
                f"fit (inductor) at torch knob {share}",
                lambda budget=budget: fitted(bench, budget, "inductor"),
            )
    yield row("eager, again", eager)


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def run_models(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    name: str,
    rows_of: Callable[[str, torch.device, argparse.Namespace], Iterable[Row]],
    steps: str,
    shares: str = "0.75,0.5",
) -> None:
    """Measure the models that were asked for, and publish their rows."""
    parser.add_argument("--executors", default="eager,exact,inductor")
    parser.add_argument("--shares", type=numbers, default=shares)
    options = parsed(parser, arguments)
    options.executors = [name for name in options.executors.split(",") if name]
    device = device_at_hand()
    rows = [
        row
        for model in options.models.split(",")
        for row in rows_of(model, device, options)
    ]
    publish(
        name,
        rows,
        device=device,
        settings={steps: options.steps, "dtype": "bfloat16 on a GPU"},
        folder=options.out,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--knobs", type=numbers, default="1,0.7,0.5,0.3,0.1,0")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=int, default=240, help="seconds for each row")
    shares = "0.9,0.75,0.6,0.5,0.4"
    run_models(parser, arguments, "hugging-face", rows_of, "steps in a row", shares)


if __name__ == "__main__":
    main()
