"""Built-in models: the shapes of their layers, the multiplications and the memory of one sample.

Sources: He et al., "Deep residual learning" (2015), with the stride in the 3x3 convolution, as torchvision has it;
Devlin et al., "BERT" (2018); Radford et al., "GPT-2" (2019); Touvron et al., "LLaMA" (2023), the model with 7 billion
parameters. Bytes of activations per transformer layer: 34 per token and feature at 16 bits, with attention that is
recomputed (Korthikanti et al., "Reducing activation recomputation", 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from topkube.errors import ArgumentError
from topkube.planning.profile import FORWARD_SHARE, Gradient, StepProfile


@dataclass(frozen=True)
class Layer:
    """A layer with the shapes of its parameters, the `flops` of its forward for one sample (a multiplication and an
    addition count as two), and the bytes of `activations` that backward needs for one sample."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: float
    activations: float = 0.0


@dataclass(frozen=True)
class Model:
    """A model: its layers in the order of forward, and the name of a sample."""

    name: str
    layers: tuple[Layer, ...]
    sample: str

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for layer in self.layers for shape in layer.shapes)

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward for one sample."""
        return sum(layer.flops for layer in self.layers) / FORWARD_SHARE

    @property
    def activations(self) -> float:
        """Bytes that backward needs for one sample."""
        return sum(layer.activations for layer in self.layers)

    def build_profile(self, compute: float) -> StepProfile:
        """Return the profile of a step whose forward and backward take `compute` seconds, divided among the layers by
        their multiplications."""
        whole = sum(layer.flops for layer in self.layers)
        gradients = []
        for layer in reversed(self.layers):
            seconds = compute * (1 - FORWARD_SHARE) * layer.flops / whole
            sizes = [math.prod(shape) for shape in layer.shapes]
            for number, (shape, size) in enumerate(zip(layer.shapes, sizes, strict=True)):
                is_always_dense = len(shape) <= 1
                share = seconds * size / sum(sizes)
                gradients.append(Gradient(f"{layer.name}.{number}", size, share, is_always_dense=is_always_dense))
        return StepProfile(self.name, compute * FORWARD_SHARE, tuple(gradients), on_cpu=False)


def build_resnet50(image: int = 224) -> Model:
    """Return ResNet-50 for square images of `image` pixels and 1,000 classes."""
    layers: list[Layer] = []

    def add_convolution(name: str, inputs: int, outputs: int, kernel: int, size: int) -> None:
        flops = 2.0 * inputs * outputs * kernel**2 * size**2
        stored = 2 * outputs * size**2 * 2  # the outputs of convolution and normalization, 16 bits
        layers.append(Layer(name, ((outputs, inputs, kernel, kernel), (outputs,), (outputs,)), flops, stored))

    size = -(-image // 2)  # each halving rounds up
    add_convolution("conv1", 3, 64, 7, size)
    size, inputs = -(-size // 2), 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            before = size
            if stage > 1 and block == 0:
                size = -(-size // 2)
            name = f"layer{stage}.{block}"
            add_convolution(f"{name}.conv1", inputs, width, 1, before)
            add_convolution(f"{name}.conv2", width, width, 3, size)
            add_convolution(f"{name}.conv3", width, 4 * width, 1, size)
            if block == 0:
                add_convolution(f"{name}.downsample", inputs, 4 * width, 1, size)
            inputs = 4 * width
    layers.append(Layer("fc", ((1000, inputs), (1000,)), 2.0 * inputs * 1000))
    return Model(f"ResNet-50, images of {image} x {image}", tuple(layers), "image")


def _build_transformer(name: str, layers: int, width: int, tokens: int, tables: list[int], head: list[Layer]) -> Model:
    """Return a transformer with biases, normalization before or after, and a feed-forward width of 4 x `width`.

    `tables` has the number of rows of each embedding, `head` the layers after the transformer."""
    attention = 4.0 * tokens**2 * width
    stored = 34.0 * tokens * width / 4  # divided among the four linear layers

    def build_linear_layer(name: str, inputs: int, outputs: int, attention_flops: float = 0.0) -> Layer:
        return Layer(name, ((outputs, inputs), (outputs,)), 2.0 * tokens * inputs * outputs + attention_flops, stored)

    body = [Layer(f"embedding{number}", ((rows, width),), 0.0) for number, rows in enumerate(tables)]
    for number in range(layers):
        body += [
            Layer(f"{number}.norm1", ((width,), (width,)), 0.0),
            build_linear_layer(f"{number}.query_key_value", width, 3 * width, attention),
            build_linear_layer(f"{number}.projection", width, width),
            Layer(f"{number}.norm2", ((width,), (width,)), 0.0),
            build_linear_layer(f"{number}.expand", width, 4 * width),
            build_linear_layer(f"{number}.reduce", 4 * width, width),
        ]
    return Model(f"{name}, {tokens} tokens", (*body, *head), "sequence")


def build_bert_large(tokens: int = 128) -> Model:
    """Return BERT-large with its masked-language head, which shares the matrix of the embedding."""
    head = [
        Layer("pooler", ((1024, 1024), (1024,)), 2.0 * 1024 * 1024),
        Layer("transform", ((1024, 1024), (1024,), (1024,), (1024,)), 2.0 * tokens * 1024 * 1024),
        Layer("prediction", ((30522,),), 2.0 * tokens * 1024 * 30522),
    ]
    return _build_transformer("BERT-large", 24, 1024, tokens, [30522, 512, 2], head)


def build_gpt2(tokens: int = 1024) -> Model:
    """Return the smallest GPT-2, whose head shares the matrix of the embedding."""
    head = [Layer("norm", ((768,), (768,)), 2.0 * tokens * 768 * 50257)]
    return _build_transformer("GPT-2", 12, 768, tokens, [50257, 1024], head)


def build_llama_7b(tokens: int = 2048) -> Model:
    """Return a LLaMA of 6.7 billion parameters."""
    width, inner, vocabulary = 4096, 11008, 32000
    stored = 34.0 * tokens * width / 7  # divided among the seven linear layers

    def build_linear_layer(name: str, inputs: int, outputs: int, attention_flops: float = 0.0) -> Layer:
        return Layer(name, ((outputs, inputs),), 2.0 * tokens * inputs * outputs + attention_flops, stored)

    layers = [Layer("embedding", ((vocabulary, width),), 0.0)]
    for number in range(32):
        layers += [
            Layer(f"{number}.norm1", ((width,),), 0.0),
            *(
                build_linear_layer(f"{number}.{part}", width, width, 4.0 * tokens**2 * width / 3)
                for part in ("query", "key", "value")
            ),
            build_linear_layer(f"{number}.output", width, width),
            Layer(f"{number}.norm2", ((width,),), 0.0),
            build_linear_layer(f"{number}.gate", width, inner),
            build_linear_layer(f"{number}.up", width, inner),
            build_linear_layer(f"{number}.down", inner, width),
        ]
    layers += [Layer("norm", ((width,),), 0.0), build_linear_layer("head", width, vocabulary)]
    return Model(f"LLaMA 7B, {tokens} tokens", tuple(layers), "sequence")


MODELS: dict[str, Callable[[], Model]] = {
    "resnet50": build_resnet50,
    "resnet50-96": lambda: build_resnet50(96),
    "bert-large": build_bert_large,
    "gpt2": build_gpt2,
    "7b": build_llama_7b,
}


def find_model(name: str) -> Model:
    """Return the built-in model called `name`. Raises ArgumentError with all names if there is none."""
    if name not in MODELS:
        raise ArgumentError(f"--model is {name!r}", next_step=f"choose one of {', '.join(MODELS)}")
    return MODELS[name]()
