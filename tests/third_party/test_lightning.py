"""Lightning's Trainer reads DataLoader2 and resumes in mid-epoch from its own checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import loader_of

from pipes.iter import IterableWrapper
from pipes.loader2 import LightningLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Recorder(lightning.LightningModule):
    """Notes the batches it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, _number: int) -> Any:
        self.seen.append(batch.tolist())
        return self.layer(batch.float()[:, None]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def make(workers: int, sized: bool) -> Any:
    pipe = IterableWrapper(range(38)).shuffle().sharding_filter()
    pipe = pipe if sized else pipe.filter(lambda x: True)
    return LightningLoader(loader_of(pipe.batch(4).collate(), workers, 2))


def train(folder: Path, loader: Any, checkpoint: Path | None = None) -> list[list[int]]:
    callbacks = [ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")]
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=None if checkpoint else callbacks,
        enable_checkpointing=checkpoint is None,
    )
    model = Recorder()
    # The checkpoint holds Lightning's own objects.
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=False)
    loader.loader.shutdown()
    return model.seen


@pytest.mark.parametrize("sized", [True, False])
def test_it_resumes_at_every_step_it_may_be_stopped_at(sized: bool, tmp_path: Path) -> None:
    whole = train(tmp_path, make(2, sized))
    assert len(whole) == 30
    epochs = [[x for batch in whole[at : at + 10] for x in batch] for at in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(38))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    for step, workers in ((1, 0), (6, 2), (9, 0), (10, 0), (11, 0), (20, 2), (29, 0), (30, 0)):
        found = train(tmp_path, make(workers, sized), tmp_path / f"step={step}.ckpt")
        assert found == whole[step:], step


def test_a_bare_loader_with_a_length_resumes_within_an_epoch(tmp_path: Path) -> None:
    class Bare:
        def __init__(self) -> None:
            self.loader = make(0, True).loader

        def state_dict(self) -> Any:
            return self.loader.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.loader.load_state_dict(state)

        def __iter__(self) -> Any:
            return iter(self.loader)

        def __len__(self) -> int:
            return len(self.loader)

    whole = train(tmp_path, Bare())
    assert train(tmp_path, Bare(), tmp_path / "step=14.ckpt") == whole[14:]
