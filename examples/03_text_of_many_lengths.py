"""Score texts of many lengths with a transformer encoder, and compute less padding: three ways, one result.

1. Batches of 32 texts as they come, padded to the longest, by the encoder's ordinary path.
2. Batches of texts of like length, of at most 4,096 tokens with their padding, by the fast path that came with
   BetterTransformer in PyTorch 1.12 (`nn.TransformerEncoder` in eval mode, without gradients, with a padding mask).
3. The same texts as nested tensors, so that no layer computes any padding, by the fast path.

    python examples/03_text_of_many_lengths.py            # a small encoder, seconds on a laptop
    python examples/03_text_of_many_lengths.py --full     # the size of BERT-base, for an accelerator

Exit status 1 says that the scores differ, that a text was lost or came twice, that there was no less padding, or that
the fast path was not taken.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import Encoder
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipes import DataLoader2, IterDataPipe
from pipes.iter import IterableWrapper
from pipes.loader2 import MultiProcessingReadingService

DEVICE = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")
VOCABULARY, LONGEST = 1000, 256
Text = tuple[int, torch.Tensor]
Batch = dict[str, torch.Tensor]


class Calls(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **kwargs or {})


def text_of(number: int) -> Text:
    """Make text `number`, int64 `(length,)`; as in real corpora, the logarithms of the lengths are about normal."""
    random = torch.Generator().manual_seed(number)
    length = int(torch.empty(1).log_normal_(3.5, 0.8, generator=random).clamp(4, LONGEST))
    return number, torch.randint(1, VOCABULARY, (length,), generator=random)


def padded(texts: list[Text]) -> Batch:
    """Put texts into one batch: `tokens` int64 and `padding` bool, both `(texts, longest)`, True where no token is."""
    tokens = nn.utils.rnn.pad_sequence([tokens for _, tokens in texts], batch_first=True)
    lengths = torch.tensor([len(tokens) for _, tokens in texts])
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    return {"number": torch.tensor([number for number, _ in texts]), "tokens": tokens, "padding": padding}


def fixed(texts: IterDataPipe[Text]) -> IterDataPipe[Batch]:
    return texts.batch(32).map(padded)


def bucketed(texts: IterDataPipe[Text]) -> IterDataPipe[Batch]:
    return texts.max_token_bucketize(4096, len_fn=lambda text: len(text[1]), include_padding=True).map(padded)


def with_mask(model: Encoder, batch: Batch) -> torch.Tensor:
    return model(batch["tokens"], batch["padding"])


def nested(model: Encoder, batch: Batch) -> torch.Tensor:
    embedded = model.tokens(batch["tokens"]) + model.places.weight[: batch["tokens"].shape[1]]
    lengths = (~batch["padding"]).sum(1).tolist()
    texts = torch.nested.nested_tensor([text[:length] for text, length in zip(embedded, lengths, strict=True)])
    firsts = torch.stack([text[0] for text in model.layers(texts).unbind()])
    return model.score(firsts)


Way = tuple[Callable[[IterDataPipe[Text]], IterDataPipe[Batch]], Callable[[Encoder, Batch], torch.Tensor], bool]
WAYS: dict[str, Way] = {
    "batches of 32, ordinary path": (fixed, with_mask, False),
    "bucketed, fast path, mask": (bucketed, with_mask, True),
    "bucketed, fast path, nested": (bucketed, nested, True),
}


def run(way: Way, model: Encoder, count: int, workers: int) -> dict[str, Any]:
    """Score `count` texts; return the scores in the order of the texts, and what was computed for them."""
    make, score, fast = way
    pipe = make(IterableWrapper(range(count)).sharding_filter().map(text_of))
    loader = DataLoader2(pipe, reading_service=MultiProcessingReadingService(num_workers=workers), device=DEVICE)
    torch.backends.mha.set_fastpath_enabled(fast)
    calls, numbers, scores, tokens, computed, seconds = Calls(), [], [], 0, 0, 0.0
    with loader, torch.inference_mode():
        for batch in loader:
            if not numbers:
                with calls:
                    score(model, batch)
            began = time.perf_counter()
            scores.append(score(model, batch).cpu())
            seconds += time.perf_counter() - began
            numbers.append(batch["number"].cpu())
            in_batch = int((~batch["padding"]).sum())
            tokens += in_batch
            computed += in_batch if score is nested else batch["tokens"].numel()
    order = torch.cat(numbers)
    as_asked = fast == ("_transformer_encoder_layer_fwd.default" in calls.names)
    fine = as_asked and sorted(order.tolist()) == list(range(count))
    return {"scores": torch.cat(scores)[order.argsort()], "batches": len(numbers), "tokens": tokens,
            "padded": computed - tokens, "seconds": seconds, "fine": fine}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="an encoder of BERT-base's size")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    torch.manual_seed(0)
    if DEVICE.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - options.workers))
    model = (Encoder(VOCABULARY) if options.full else Encoder(VOCABULARY, 64, 2, 4, LONGEST)).to(DEVICE).eval()
    results = {name: run(way, model, options.texts, options.workers) for name, way in WAYS.items()}
    table = Table("way", "batches", "tokens", "padded", "seconds", title=f"{options.texts} texts on {DEVICE}")
    for name, found in results.items():
        table.add_row(
            name, *(f"{found[each]:,}" for each in ("batches", "tokens", "padded")), f"{found['seconds']:.2f}"
        )
    Console().print(table)
    first, *others = results.values()
    same = all(torch.allclose(first["scores"], other["scores"], atol=1e-4) for other in others)
    least = max(other["padded"] for other in others)
    print(f"padded tokens: {first['padded']} in fixed batches, {least} by max_token_bucketize; same scores: {same}")
    sys.exit(0 if same and least < first["padded"] / 2 and all(each["fine"] for each in results.values()) else 1)


if __name__ == "__main__":
    main()
