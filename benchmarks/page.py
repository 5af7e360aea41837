"""The tables of docs/benchmarks.md and of the README, made from benchmarks/results.

    python -m benchmarks.page

Writes each table between its marks, `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.journal import is_infeasible, is_result

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


def filled(text: str) -> str:
    """Return a page with the tables of today's results between its marks."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


def rows_of(name: str) -> list[Row]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    rule = ["---"] * len(headings)
    lines = [f"| {' | '.join(row)} |" for row in (headings, rule, *rows)]
    return "\n".join(lines) + "\n"


ECOSYSTEM = "ecosystem_nvidia-h200_2026-11-18"
IN_TURNS = "ecosystem-in-turns_nvidia-h200_2026-11-18"
HUGGING_FACE = "hugging-face_nvidia-h200_2026-11-16"
TRAINER = "hf-trainer_nvidia-h200_2026-11-18"
FITTING = "fitting_nvidia-h200_2026-11-16"
MODELS = {
    "llama": "Llama 1.1B, 4 x 2048 tokens",
    "lora": "LoRA on Llama 7B, 2 x 2048",
    "t5": "T5-large, 16 x 512",
    "qwen3-moe": "Qwen3-MoE, 4 x 2048",
}
VISION = {"swin": "Swin-B, 128 images", "maxvit": "MaxViT-T, 96 images"}
TURNS = {
    "llama": "Llama 1.1B, 4 x 2048 tokens",
    "vit": "ViT-L (timm), 128 images",
    "u-net": "U-Net, ours",
}
CONTENDERS = {
    "eager": "plain",
    "own checkpointing": "its own checkpointing",
    "fit (eager) at own checkpointing": "`fit` at that peak",
    "torch knob 0.5": "blocks compiled, torch's budget 0.5",
    "fit (inductor) at torch knob 0.5": '`fit(compile="inductor")` at that peak',
    "torch knob 0.0": "blocks compiled, torch's budget 0",
    "fit (inductor) at torch knob 0.0": '`fit(compile="inductor")` at that peak',
}
COMPILED = {
    "eager": "plain",
    "own checkpointing": "its own checkpointing",
    "fit (inductor) at own checkpointing": '`fit(compile="inductor")` at that peak',
    "fit (inductor) at 50%": '`fit(compile="inductor")`, budget 50 %',
    "fit (inductor) at 60%": '`fit(compile="inductor")`, budget 60 %',
    "torch knob 0.5": "layers compiled, torch's budget 0.5",
    "torch knob 0.0": "layers compiled, torch's budget 0",
}
UNCOMPILED = {
    "eager": "plain",
    "own checkpointing": "its own checkpointing",
    "own checkpointing, in turns": "the same, right after `fit`",
    "fit (eager) at own checkpointing": "`fit` at that peak",
    "fit (exact) at own checkpointing": '`fit(compile="exact")` at that peak',
    "fit (eager) at 50%": "`fit`, budget 50 %",
    "recoup, a region per block": "`checkpoint_module` on every block",
}
SWITCHES = {
    "plain": "plain",
    "gradient_checkpointing=True": "`gradient_checkpointing=True`",
    "gradient_checkpointing=True, torch_compile=True": "and `torch_compile=True`",
    "RecoupCallback, eager, peak of gradient_checkpointing": "`RecoupCallback`",
    "RecoupCallback, inductor, peak of gradient_checkpointing": (
        '`RecoupCallback(compile="inductor")`'
    ),
}
TRAINED = {
    "llama-1.1b": "Llama 1.1B, 4 x 2048 tokens",
    "lora-7b": "LoRA on Llama 7B, 2 x 2048",
}


def costs(
    name: str, models: dict[str, str], contenders: dict[str, str], ms_digits: int = 0
) -> str:
    """A row for each contender, with time and peak of each model."""
    found = {(row["model"], row["contender"]): row for row in rows_of(name)}

    def rows() -> Iterator[list[str]]:
        for contender, words in contenders.items():
            cells = (_cost(found.get((m, contender)), ms_digits) for m in models)
            yield [words, *cells]

    return table(["", *models.values()], rows())


def trainer() -> str:
    """Fine-tuning by transformers' Trainer, a row for each model."""
    found = {(row["model"], row["contender"]): row for row in rows_of(TRAINER)}

    def rows() -> Iterator[list[str]]:
        for model, words in TRAINED.items():
            cells = [_pace(found[model, contender]) for contender in SWITCHES]
            yield [words, *cells[:-1], f"**{cells[-1]}**"]

    return table(["tokens per second, peak", *SWITCHES.values()], rows())


def _pace(row: Row) -> str:
    return f"{row['tokens/s']:,}, {row['peak GiB']:.1f} GiB".replace(",", " ", 1)


def _cost(row: Row | None, ms_digits: int) -> str:
    if row is None:
        return "not run"
    if row.get("ms") is None:
        return _infeasible(row)
    return f"{row['ms']:.{ms_digits}f} ms, {row['peak GiB']:.2f} GiB"


def _infeasible(row: Row) -> str:
    (needed,) = re.findall(r"need (?:about )?([0-9.]+ GiB)", row["remark"]) or [""]
    return f"infeasible{f': {needed}' if needed else ''}"


FITTED = {
    "gpt": "GPT, 24 layers of width 2048",
    "llama": "Llama, 16 layers of width 2048",
    "bert": "BERT",
    "encoder-decoder": "encoder-decoder",
    "mixture of experts, batch x4": "mixture of experts, 64 x 1024 tokens",
    "mixture of experts": "the same, 16 x 1024 tokens: launch-bound",
    "vit": "ViT-L",
    "mixer": "MLP-Mixer",
    "convnext": "ConvNeXt",
    "resnet-50": "ResNet-50",
    "densenet-121, batch x3": "DenseNet-121, 768 images",
    "densenet-121": "the same, 256 images",
    "u-net": "U-Net",
    "lstm": "LSTM, cuDNN's",
}
SHARES = ("75%", "50%", "floor")


def fitting() -> str:
    found = {(row["model"], row["share"]): row for row in rows_of(FITTING)}

    def rows() -> Iterator[list[str]]:
        for model, words in FITTED.items():
            plain = found[model, "75%"]
            costs = f"{plain['plain GiB']:.1f} GiB, {plain['plain ms']:.0f} ms"
            yield [words, costs, *(_fitted(found[model, share]) for share in SHARES)]

    headings = ["`fit`, measured", "plain", "75 %", "50 %", "the floor"]
    return table(headings, rows())


def _fitted(row: Row) -> str:
    if "measured GiB" not in row:
        return "infeasible"
    slower = row["measured ms"] / row["plain ms"] - 1
    return f"{row['measured GiB']:.1f} GiB, {slower * 100:+.0f} %"


FRONTIER = {
    "gpt": "GPT, 2048",
    "gpt wide": "GPT, 4096",
    "vit": "ViT-L",
    "resnet-152": "ResNet-152",
    "u-net": "U-Net",
}
PEERS = {
    "torch checkpoint, every block": "`torch.utils.checkpoint`, every block",
    "torch checkpoint, every second block": (
        "`torch.utils.checkpoint`, every second block"
    ),
    "torch SAC, default list": "torch selective checkpointing, its default list",
}
KNOBS = {f"torch.compile, budget {b}": f"budget {b}" for b in (0.5, 0.2)}


def against(name: str, peers: dict[str, str]) -> str:
    found = {(row["model"], row["contender"]): row for row in rows_of(name)}

    def rows() -> Iterator[list[str]]:
        for peer, words in peers.items():
            pairs = [
                (found[model, f"recoup beside {peer}"], found[model, peer])
                for model in FRONTIER
            ]
            yield [words, *(_against(ours, theirs) for ours, theirs in pairs)]

    headings = ["time of `fit` at the measured peak of", *FRONTIER.values()]
    return table(headings, rows())


def _against(ours: Row, theirs: Row) -> str:
    if ours.get("step ms") is None:
        return "below our floor"
    slower = 100 * (ours["step ms"] / theirs["step ms"] - 1)
    return f"{slower:+.{1 if abs(slower) < 1 else 0}f} %"


BY_HAND = {
    "plain": "plain",
    "torch checkpoint": "`torch.utils.checkpoint` per block",
    "torch SAC, recompute all": "torch selective checkpointing, recomputing all",
    "recoup scope": "**`CheckpointScope` per block**",
    "torch SAC, keep costly": (
        "torch selective checkpointing, keeping products and attention"
    ),
    "recoup scope, keep costly": "**`CheckpointScope(policy=KeepCostly())`**",
}


def by_hand() -> str:
    found = {
        row["contender"]: row for row in rows_of("overhead_nvidia-h200_2026-11-16")
    }

    def rows() -> Iterator[list[str]]:
        for contender, words in BY_HAND.items():
            row = found[contender]
            micros = [row[f"us per operator, step, {d}"] for d in ("cpu", "cuda")]
            yield [
                words,
                f"{row['step ms']:.0f}",
                f"{row['peak GiB']:.1f}",
                f"{row['host ms']:.0f}",
                *(f"{us:.0f}" if us else "" for us in micros),
            ]

    headings = ["a training step", "ms", "peak GiB", "host ms"]
    return table([*headings, "host µs per operator (CPU)", "(CUDA)"], rows())


CAMPAIGN = "campaign_nvidia-h200"
CAMPAIGN_MODELS = {
    "llama": "Llama 1.1B, 4 x 2048 tokens",
    "qwen3-moe": "Qwen3-MoE, 4 x 2048",
    "t5": "T5-large, 16 x 512",
    "whisper": "Whisper-medium, 8 x 1500 frames",
    "lora": "LoRA on Llama 7B, 2 x 2048",
    "swin": "Swin-B, 128 images",
    "convnext": "ConvNeXt-L, 96 images",
    "maxvit": "MaxViT-T, 96 images",
    "vit": "ViT-L (timm), 128 images",
    "resnext": "ResNeXt-101, 128 images",
    "gpt": "GPT, ours",
    "u-net": "U-Net, ours",
    "resnet-152": "ResNet-152, ours",
}
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
PEAK_SHARES = ("90%", "75%", "60%", "50%", "40%")


class Campaign:
    """The rows that many runs measured, each compared with one of the same run."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    @classmethod
    def known(cls) -> "Campaign":
        return cls(rows_of(CAMPAIGN) if (RESULTS / f"{CAMPAIGN}.json").exists() else ())

    def knobs(self) -> str:
        def cell(model: str, budget: float) -> str:
            theirs = f"torch knob {budget}"
            ours, other = self._pair(model, f"fit (inductor) at {theirs}", theirs)
            if not ours and "failed" in (
                failed := self._pair(model, theirs, theirs)[0]
            ):
                return f"torch: {failed['failed']}"
            return _slower(ours, other) + _peak(other)

        heading = 'time of `fit(compile="inductor")` at the measured peak of budget'
        return self._table([heading, *(f"{b:g}" for b in BUDGETS)], cell, BUDGETS)

    def shares(self) -> str:
        def cell(model: str, share: str) -> str:
            return _slower(*self._pair(model, f"fit (inductor) at {share}", "eager"))

        heading = 'time of `fit(compile="inductor")` against the plain step, budget'
        return self._table([heading, *PEAK_SHARES], cell, PEAK_SHARES)

    def own(self) -> str:
        def cell(model: str, contender: str) -> str:
            ours, own = self._pair(model, contender, "own checkpointing")
            if not own:
                return "not run"
            if contender == "own checkpointing":
                return f"{own['ms']:.0f} ms{_peak(own)}, host {own['host ms']:.0f} ms"
            host = f", host {ours['host ms']:.0f} ms" if "host ms" in ours else ""
            return _slower(ours, own) + host

        headings = ["", "its own checkpointing", "`fit` at that peak"]
        headings.append('`fit(compile="exact")`')
        names = ("eager", "exact")
        fits = (f"fit ({name}) at own checkpointing" for name in names)
        return self._table(headings, cell, ("own checkpointing", *fits))

    def predictions(self) -> str:
        def cell(model: str, what: str) -> str:
            rows = [
                row
                for row in self.rows
                if row["model"] == model and "predicted ms" in row and "ms" in row
            ]
            if not rows:
                return "not run"
            if what == "rows":
                return str(len(rows))
            if what == "above":
                return str(sum(r["peak bytes"] > r["budget bytes"] for r in rows))
            measured, predicted = what, what.replace("peak", "predicted")
            predicted = "predicted ms" if what == "ms" else predicted
            errors = [100 * (row[predicted] / row[measured] - 1) for row in rows]
            return f"{max(errors, key=abs):+.1f} %"

        headings = ["", "largest error of the predicted peak", "of the predicted time"]
        headings += ["peaks above the budget", "fits"]
        return self._table(headings, cell, ("peak bytes", "ms", "above", "rows"))

    def _table(
        self, headings: Sequence[str], cell: Callable[..., str], columns: Sequence[Any]
    ) -> str:
        def rows() -> Iterator[list[str]]:
            for model, words in CAMPAIGN_MODELS.items():
                yield [words, *(cell(model, column) for column in columns)]

        return table(headings, rows())

    def _pair(self, model: str, ours: str, theirs: str) -> tuple[Row, Row]:
        """Return both rows of the last run that has them; empty: none has."""
        runs: dict[str, dict[str, Row]] = {}
        for row in self.rows:
            if row["model"] == model:
                runs.setdefault(row["run"], {})[row["contender"]] = row
        for _, found in sorted(runs.items(), reverse=True):
            pair = found.get(ours, {}), found.get(theirs, {})
            if all(is_result(row) for row in pair):
                return pair
        return {}, {}


def _slower(ours: Row, theirs: Row) -> str:
    if not ours:
        return "not run"
    if is_infeasible(ours):
        return _infeasible(ours)
    if "failed" in ours:
        return f"fails: {ours['failed']}"
    return f"{100 * (ours['ms'] / theirs['ms'] - 1):+.1f} %"


def _peak(row: Row) -> str:
    return f", {row['peak GiB']:.1f} GiB" if row else ""


TABLES: dict[str, Callable[[], str]] = {
    "campaign-knobs": lambda: Campaign.known().knobs(),
    "campaign-shares": lambda: Campaign.known().shares(),
    "campaign-own": lambda: Campaign.known().own(),
    "campaign-predictions": lambda: Campaign.known().predictions(),
    "trainer": trainer,
    "uncompiled": lambda: costs(ECOSYSTEM, {**MODELS, **VISION}, UNCOMPILED),
    "in-turns": lambda: costs(IN_TURNS, TURNS, CONTENDERS, ms_digits=1),
    "hugging-face": lambda: costs(HUGGING_FACE, MODELS, COMPILED),
    "fitting": fitting,
    "eager-peers": lambda: against("frontier_nvidia-h200_2026-11-16", PEERS),
    "compiled": lambda: against("frontier-compiled_nvidia-h200_2026-11-16", KNOBS),
    "by-hand": by_hand,
}


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
