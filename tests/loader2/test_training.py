"""Training code of many kinds takes the loader's batches as they are; one start of workers, an accelerator if any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

DEVICE = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")
BATCH, COUNT = 8, 4
#: Bytes of images enough to lie in shared memory: smaller leaves of a batch travel in its message.
SIDE = 40

Batch = dict[str, torch.Tensor]
Batches = list[Batch]


def sample(number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    waves = torch.randn(2, SIDE, SIDE, 2, generator=draw)
    return {
        "image": torch.randn(3, SIDE, SIDE, generator=draw),
        "label": torch.tensor(number % 4),
        "wave": torch.view_as_complex(waves),
        "half": torch.view_as_complex(waves.half()),
    }


def reals(x: torch.Tensor) -> torch.Tensor:
    """What torch can compare: it has no `equal` of complex32."""
    return torch.view_as_real(x) if x.is_complex() else x


@pytest.fixture(scope="module")
def batches() -> Batches:
    pipe = IterableWrapper(range(BATCH * COUNT)).batch(BATCH).sharding_filter().map(lambda ns: [sample(n) for n in ns])
    service = MultiProcessingReadingService(num_workers=2)
    with DataLoader2(pipe.collate(), reading_service=service, device=DEVICE) as loader:
        found = list(loader)
        # Read where the workers wrote it.
        assert loader.stats()["copied_batches"] == 0
    for place, batch in enumerate(found):
        for name in batch:
            expected = torch.stack([sample(n)[name] for n in range(place * BATCH, (place + 1) * BATCH)])
            assert batch[name].dtype is expected.dtype
            assert reals(batch[name]).cpu().equal(reals(expected))
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 100, 4)
    return nn.Sequential(*layers).to(DEVICE)


def loss_of(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, label)


def complex64_convolution(batches: Batches) -> None:
    """A complex convolution is two by two real ones; its gradient leads downwards."""
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, dtype=torch.complex64, bias=False, device=DEVICE)
    wave, weight, real = batches[0]["wave"], layer.weight.detach(), nn.functional.conv2d
    expected = torch.complex(
        real(wave.real, weight.real) - real(wave.imag, weight.imag),
        real(wave.real, weight.imag) + real(wave.imag, weight.real),
    )
    torch.testing.assert_close(layer(wave), expected, atol=1e-4, rtol=1e-4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = layer(batch["wave"]).abs().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def complex32_convolution(batches: Batches) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, dtype=torch.complex64, bias=False, device=DEVICE)
    for batch in batches:
        found = nn.functional.conv2d(batch["half"], layer.weight.to(torch.complex32))
        assert found.dtype is torch.complex32
        torch.testing.assert_close(found.to(torch.complex64), layer(batch["wave"]), atol=0.02, rtol=0.02)


def per_sample_gradients(batches: Batches) -> None:
    model = network()
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return loss_of(func.functional_call(model, parameters, (image[None],)), label[None])

    each = func.vmap(func.grad(loss), in_dims=(None, 0, 0))
    for batch in batches:
        found = each(parameters, batch["image"], batch["label"])
        for place in (0, BATCH - 1):
            model.zero_grad()
            loss_of(model(batch["image"][place : place + 1]), batch["label"][place : place + 1]).backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name][place], parameter.grad, atol=1e-4, rtol=1e-4)


def forward_mode(batches: Batches) -> None:
    """The derivative along a direction is the product of that direction and the gradient."""
    model = network()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    direction = {name: torch.ones_like(each) for name, each in parameters.items()}
    for batch in batches:

        def loss(parameters: dict[str, torch.Tensor], batch: Batch = batch) -> torch.Tensor:
            return loss_of(func.functional_call(model, parameters, (batch["image"],)), batch["label"])

        value, along = func.jvp(loss, (parameters,), (direction,))
        gradients = func.grad(loss)(parameters)
        torch.testing.assert_close(value, loss(parameters))
        torch.testing.assert_close(along, sum(each.sum() for each in gradients.values()), atol=1e-3, rtol=1e-3)


def compiled_step(batches: Batches) -> None:
    """One graph serves all batches: it is never compiled again for how a batch lies in memory.

    The backend is torch's "aot_eager", which traces forward and backward; the default one adds 15 s of a C++ compiler.
    """
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    eager, model = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return loss_of(model(image), label)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for batch in batches:
        eager.load_state_dict(model.state_dict())
        eager.zero_grad()
        expected = loss_of(eager(batch["image"]), batch["label"])
        expected.backward()
        optimizer.zero_grad()
        loss = compiled(batch["image"], batch["label"])
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for found, parameter in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(found.grad, parameter.grad)
        optimizer.step()
    assert counter.frame_count == 1


def matmul_precision(batches: Batches) -> None:
    model = network()
    before = torch.get_float32_matmul_precision()
    scores = {}
    try:
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            scores[setting] = torch.cat([model(batch["image"]).detach() for batch in batches])
            assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)
    exact = torch.cat([model.double()(batch["image"].double()).detach() for batch in batches])
    torch.testing.assert_close(scores["highest"].double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores["high"].double(), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode calls it
# Torch's own, from Python 3.14 on.
@pytest.mark.filterwarnings("ignore:.*is not supported in Python 3.14:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        complex64_convolution,
        complex32_convolution,
        per_sample_gradients,
        forward_mode,
        compiled_step,
        matmul_precision,
    ],
)
def test_training_code_takes_the_batches(
    kind: Callable[[Any], None], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a GPU's convolutions round to 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    kind(batches)
