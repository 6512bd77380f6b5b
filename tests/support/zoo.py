"""Small models of many families, each with its loss and one batch, for tests of the graph.

Every entry makes a fresh module with real tensors and a batch; the numbers are fixed by the seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from fusion_tasks.models import CausalLoss, load_config, prepare

__all__ = ["ZOO", "Entry"]

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo. `random`: it draws random numbers in training."""

    make: Callable[[], tuple[nn.Module, Batch]]
    random: bool = False


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def _tokens(batch: int = 2, length: int = 12, vocabulary: int = 64) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def _causal(config: PretrainedConfig) -> tuple[nn.Module, Batch]:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return CausalLoss(prepare(model)), _tokens()


class _LabelledLoss(nn.Module):
    """A model of `transformers` that works out its own loss from labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.inner(input_ids=input_ids, labels=labels)
        return {"loss": out.loss, "logits": out.logits}


def _bert() -> tuple[nn.Module, Batch]:
    sizes = {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}
    return _LabelledLoss(BertForMaskedLM(BertConfig(**sizes))), _tokens()


def _t5() -> tuple[nn.Module, Batch]:
    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return _LabelledLoss(T5ForConditionalGeneration(config)), _tokens()


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y)) + self.skip(x)
        return F.relu(y)


class ResNet(nn.Module):
    """Residual convolutions with batch norm and dropout; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(3, 8), _Block(8, 8), _Block(8, 16))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor]:
        features = self.drop(self.blocks(image).mean((2, 3)))
        logits = self.head(features)
        return {"loss": F.cross_entropy(logits, label), "logits": logits}


class UNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(channels, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up2 = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.up1 = nn.Conv2d(16, channels, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.predict(image), target)

    def predict(self, image: Tensor) -> Tensor:
        a = F.silu(self.down1(image))
        b = F.silu(self.down2(F.max_pool2d(a, 2)))
        c = self.norm(self.middle(b))
        d = F.silu(self.up2(torch.cat([c, b], dim=1)))
        predicted: Tensor = self.up1(torch.cat([d, a], dim=1))
        return predicted


class Diffusion(nn.Module):
    """Noise prediction: noise and time steps are drawn inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(2)
        self.alphas: Tensor
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 10))

    def forward(self, image: Tensor) -> Tensor:
        noise = torch.randn_like(image)
        step = torch.randint(0, 10, (image.shape[0],), device=image.device)
        alpha = self.alphas[step][:, None, None, None]
        noisy = alpha.sqrt() * image + (1 - alpha).sqrt() * noise
        level = alpha.expand(-1, 1, *image.shape[2:])
        predicted = self.net.predict(torch.cat([noisy, level], dim=1))
        return F.mse_loss(predicted[:, :1], noise)


class Gnn(nn.Module):
    """Message passing by scatter; the graph's edges are an input that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.embed = nn.Linear(4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        degree = torch.zeros(x.shape[0], device=x.device).index_add(
            0, edges[1], torch.ones(edges.shape[1], device=x.device)
        )
        for layer in self.layers:
            message = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            h = h + F.relu(layer(message / degree.clamp(min=1)[:, None]))
        return F.cross_entropy(self.out(h), y)


@dataclass
class TowerOutput:
    """A plain dataclass: capture takes it as it is."""

    loss: Tensor
    similarity: Tensor


class TwoTower(nn.Module):
    """Contrastive: two encoders, one loss over all pairs; the temperature is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.right = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, text: Tensor, image: Tensor) -> TowerOutput:
        a = F.normalize(self.left(text), dim=-1)
        b = F.normalize(self.right(image), dim=-1)
        similarity = self.scale.exp() * a @ b.t()
        target = torch.arange(text.shape[0], device=text.device)
        loss = (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.t(), target)) / 2
        return TowerOutput(loss, similarity)


class Vae(nn.Module):
    """Sampling in the middle, a frozen layer, and two terms of the loss at different depths."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(20, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(F.relu(self.encode(x))))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        divergence: Tensor = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        reconstruction = F.binary_cross_entropy_with_logits(self.decode(z), x)
        return reconstruction + 0.01 * divergence


def _images(channels: int, size: int = 8, batch: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)


def _gnn_batch() -> Batch:
    return {
        "x": torch.randn(9, 4),
        "edges": torch.randint(0, 9, (2, 20)),
        "y": torch.randint(0, 3, (9,)),
    }


def _seeded(make: Callable[[], tuple[nn.Module, Batch]]) -> Callable[[], tuple[nn.Module, Batch]]:
    def made() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        return make()

    return made


ZOO: Mapping[str, Entry] = {
    name: Entry(make=_seeded(make), random=random)
    for name, (make, random) in {
        "gpt2": (
            lambda: _causal(
                load_config(layers=3, width=32, heads=4, context=16, vocab_size=64, dropout=0.1)
            ),
            True,
        ),
        "llama": (lambda: _causal(LlamaConfig(**_SIZES)), False),
        "llama-tied": (lambda: _causal(LlamaConfig(**_SIZES, tie_word_embeddings=True)), False),
        "qwen3": (lambda: _causal(Qwen3Config(**_SIZES, head_dim=8)), False),
        "mistral-window": (lambda: _causal(MistralConfig(**_SIZES, sliding_window=4)), False),
        "mixtral": (lambda: _causal(MixtralConfig(**_SIZES, num_local_experts=4)), False),
        "bert": (_bert, True),
        "t5": (_t5, True),
        "resnet": (
            lambda: (ResNet(), {"image": _images(3), "label": torch.randint(0, 10, (3,))}),
            True,
        ),
        "unet": (lambda: (UNet(), {"image": _images(1), "target": _images(1)}), False),
        "diffusion": (lambda: (Diffusion(), {"image": _images(1)}), True),
        "gnn": (lambda: (Gnn(), _gnn_batch()), False),
        "two-tower": (
            lambda: (TwoTower(), {"text": torch.randn(5, 12), "image": torch.randn(5, 6)}),
            False,
        ),
        "vae": (lambda: (Vae(), {"x": torch.rand(4, 20)}), True),
    }.items()
}
