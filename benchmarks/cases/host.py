"""Host time of recomputing whole layers, versus torch's own checkpointing.

Models of Hugging Face in a size in which kernels take no time: the step is the host's
time alone, as it is on an accelerator that waits for launches. Every contender
recomputes the same: each layer as a whole. Beside the times, which vary on a shared
machine, what does not: the calls of a step.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from benchmarks.ecosystem import Case, llama, qwen3_moe, t5
from benchmarks.harness import Row, in_turns, markdown_table, parsed, publish
from recoup import Plan
from recoup.backend.operators.dispatch import OperatorMode
from recoup.core.plan import Place, Span
from recoup.engine.applied.model_blocks import block_names, repeated_names

TOKENS = 16


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    tokens = torch.randint(config.vocab_size, (1, TOKENS))
    return Case(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens})


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    model = ViTForImageClassification(config)
    pixels = torch.randn(1, 3, 32, 32)
    return Case(model, {"pixel_values": pixels, "labels": torch.zeros(1).long()})


def _short(make: Callable[..., Case]) -> Case:
    """Return a model with one row of few tokens."""
    case = make(large=False)
    return Case(case.model, {k: v[:1, :TOKENS] for k, v in case.inputs.items()})


MODELS: dict[str, Callable[[], Case]] = {
    "llama": partial(_short, llama),
    "qwen3-moe": partial(_short, qwen3_moe),
    "t5": partial(_short, t5),
    "gpt2": gpt2,
    "vit": vit,
}


def layers_of(model: nn.Module) -> list[str]:
    return list(repeated_names(model, block_names(model)))


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    del model
    yield


@contextmanager
def own(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def _wrapped(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    layers = [model.get_submodule(name) for name in layers_of(model)]
    for layer in layers:
        layer.__dict__["forward"] = partial(call, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


@contextmanager
def torch_checkpoint(model: nn.Module) -> Iterator[None]:
    yield from _wrapped(model, partial(checkpoint, use_reentrant=False))


@contextmanager
def rerun(model: nn.Module) -> Iterator[None]:
    yield from _wrapped(model, recoup.rerun)


@contextmanager
def plan(model: nn.Module, *, by_call: bool) -> Iterator[None]:
    """Recompute each layer from recorded operators, or by calling it again."""
    spans = [
        Span(Place(name, 0, True), Place(name, 0, False), by_call=by_call)
        for name in layers_of(model)
    ]
    applied = recoup.apply_plan(model, Plan(tuple(spans)))
    try:
        yield
    finally:
        applied.remove()


CONTENDERS = {
    "plain": plain,
    "own checkpointing": own,
    "torch.utils.checkpoint": torch_checkpoint,
    "recoup plan, recorded": partial(plan, by_call=False),
    "recoup plan, called again": partial(plan, by_call=True),
    "recoup rerun": rerun,
}


class Steps:
    """Steps of one model under one contender, which stays on it."""

    def __init__(self, case: Case) -> None:
        self._model, self._batch = case.model.train(), case.inputs

    def forward(self) -> torch.Tensor:
        self._model.zero_grad(set_to_none=True)
        return self._model(**self._batch).loss

    def seconds(self) -> tuple[float, float]:
        """Return the CPU time of forward and of backward, without collections."""
        gc.collect(0)
        gc.disable()
        start = time.thread_time()
        loss = self.forward()
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        gc.enable()
        return middle - start, end - middle

    def calls(self) -> tuple[int, int]:
        """Return the calls of Python functions and of others in a step."""
        counts = {"call": 0, "c_call": 0}

        def note(frame: FrameType, event: str, argument: object) -> None:
            del frame, argument
            if event in counts:
                counts[event] += 1

        gc.collect()
        gc.disable()
        sys.setprofile(note)
        try:
            self.forward().backward()
        finally:
            sys.setprofile(None)
            gc.enable()
        return counts["call"], counts["c_call"]

    def dispatches(self) -> int:
        """Return the operators of a step below autograd."""
        with _Counter() as counter:
            self.forward().backward()
        return counter.count


class _Counter(OperatorMode):
    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


def rows_of(name: str, *, rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        steps: dict[str, Steps] = {}
        for contender, put_on in CONTENDERS.items():
            torch.manual_seed(0)
            case = MODELS[name]()
            stack.enter_context(put_on(case.model))
            steps[contender] = Steps(case)
        yield from _rows(name, steps, rounds=rounds)


def _rows(name: str, steps: dict[str, Steps], *, rounds: int) -> Iterator[Row]:
    times = in_turns(
        {each: one.seconds for each, one in steps.items()}, warmup=6, rounds=rounds
    )
    for contender, pairs in times.items():
        forwards, backwards = zip(*pairs, strict=True)
        python, others = steps[contender].calls()
        yield {
            "model": name,
            "contender": contender,
            "forward ms": round(1e3 * min(forwards), 2),
            "backward ms": round(1e3 * min(backwards), 2),
            "step ms": round(1e3 * min(map(sum, pairs)), 2),
            "Python calls": python,
            "other calls": others,
            "operators": steps[contender].dispatches(),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, no meaning")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=60)
    options = parsed(parser, arguments)
    torch.set_num_threads(1)
    rounds = 2 if options.small else options.rounds
    names = options.models.split(",")
    rows = [row for name in names for row in rows_of(name, rounds=rounds)]
    print(markdown_table(rows))
    publish(
        "host",
        rows,
        device=torch.device("cpu"),
        settings={
            "times": f"least of {rounds} rounds in turns, CPU time of the thread",
            "decision": "each layer is recomputed as a whole",
        },
        folder=options.out,
    )


if __name__ == "__main__":
    main()
