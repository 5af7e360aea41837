"""Every model of the zoo, by name."""

from torch.nn.functional import cross_entropy

from benchmarks.zoo import convolutional, decoders, encoders, sequences
from benchmarks.zoo.case import Case, token_loss

_ALL = (
    Case(
        "gpt",
        lambda scale: decoders.Decoder(decoders.GPT_SHAPES[scale][0]),
        lambda scale: decoders.sequences(*decoders.GPT_SHAPES[scale]),
        token_loss,
    ),
    Case(
        "gpt wide",
        lambda scale: decoders.Decoder(decoders.WIDE_SHAPES[scale][0]),
        lambda scale: decoders.sequences(*decoders.WIDE_SHAPES[scale]),
        token_loss,
    ),
    Case(
        "gpt dropout",
        lambda scale: decoders.Decoder(decoders.DROPOUT_SHAPES[scale][0]),
        lambda scale: decoders.sequences(*decoders.DROPOUT_SHAPES[scale]),
        token_loss,
    ),
    Case(
        "llama",
        lambda scale: decoders.Llama(decoders.LLAMA_SHAPES[scale][0]),
        lambda scale: decoders.sequences(*decoders.LLAMA_SHAPES[scale]),
        token_loss,
    ),
    Case(
        "mixture of experts",
        lambda scale: decoders.ExpertDecoder(decoders.EXPERT_SHAPES[scale][0]),
        decoders.expert_batch,
        token_loss,
    ),
    Case(
        "bert",
        lambda scale: encoders.Bert(encoders.BERT_SHAPES[scale]),
        encoders.bert_batch,
        encoders.bert_loss,
    ),
    Case(
        "vit",
        lambda scale: encoders.VisionTransformer(encoders.VIT_SHAPES[scale]),
        encoders.vit_batch,
        cross_entropy,
    ),
    Case(
        "encoder-decoder",
        lambda scale: encoders.Translator(encoders.TRANSLATOR_SHAPES[scale]),
        encoders.translator_batch,
        token_loss,
    ),
    Case(
        "resnet-50",
        convolutional.resnet50,
        convolutional.labelled_images,
        cross_entropy,
    ),
    Case(
        "resnet-152",
        convolutional.resnet152,
        convolutional.labelled_images,
        cross_entropy,
    ),
    Case(
        "densenet-121",
        convolutional.densenet121,
        convolutional.labelled_images,
        cross_entropy,
    ),
    Case(
        "convnext",
        convolutional.convnext,
        convolutional.labelled_images,
        cross_entropy,
    ),
    Case("u-net", convolutional.unet, convolutional.unet_batch, cross_entropy),
    Case(
        "lstm",
        lambda scale: sequences.LstmStack(sequences.LSTM_SHAPES[scale]),
        sequences.lstm_batch,
        token_loss,
    ),
    Case(
        "mixer",
        lambda scale: sequences.Mixer(sequences.MIXER_SHAPES[scale]),
        sequences.mixer_batch,
        cross_entropy,
    ),
)

CASES = {case.name: case for case in _ALL}
