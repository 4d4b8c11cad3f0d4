"""Networks in the shapes of ResNet-50, VGG-16 and BERT-base, or smaller, in plain torch; random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["Encoder", "resnet", "vgg"]


class Bottleneck(nn.Module):
    """The block of He et al., "Deep residual learning for image recognition" (CVPR 2016), its stride on the 3x3."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        same = stride == 1 and inside == outside
        self.skip: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.skip(x))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Sequential:
    """Images `(N, 3, H, W)` to scores `(N, classes)`; by default ResNet-50."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inside = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inside, width << stage, 2 if stage and not block else 1))
            inside = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def vgg(
    convolutions: Sequence[int] = (2, 2, 3, 3, 3), width: int = 64, hidden: int = 4096, classes: int = 1000
) -> nn.Sequential:
    """Images `(N, 3, H, W)` to scores `(N, classes)`; by default VGG-16 (Simonyan and Zisserman, 2015)."""
    layers: list[nn.Module] = []
    inside = 3
    for stage, count in enumerate(convolutions):
        outside = width * min(2**stage, 8)
        for _ in range(count):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(inside * 49, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(hidden, classes))


class Encoder(nn.Module):
    """Tokens `(N, L)` int64 to scores `(N, classes)`; by default the size of BERT-base (Devlin et al., 2019)."""

    def __init__(
        self,
        vocabulary: int = 30_522,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        longest: int = 512,
        classes: int = 2,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.score = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """`padding` is True where there is no token, bool `(N, L)`."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        scores: torch.Tensor = self.score(self.layers(x, src_key_padding_mask=padding)[:, 0])
        return scores
