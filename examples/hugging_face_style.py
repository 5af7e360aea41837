"""A model in the style of Hugging Face: keyword arguments in, an output with a loss.

Run it with `python examples/hugging_face_style.py`.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import recoup

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 50, 64, 6, 8, 32


@dataclass
class Output:
    """What the model returns."""

    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """An encoder that says of each token which it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor
    ) -> Output:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Run a step; return the gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    model(**batch).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Compare the plain model with one in a budget."""
    torch.manual_seed(0)
    plain = Classifier()
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones_like(tokens)
    mask[:, -4:] = 0
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    model = copy.deepcopy(plain)
    model, report = recoup.fit(model, batch, budget=0.75)
    print(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    found, expected = gradients(model, batch), gradients(plain, batch)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    report.remove()
    print("The batch was a dictionary, the loss was found; all is bitwise equal.")


if __name__ == "__main__":
    main()
