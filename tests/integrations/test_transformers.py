"""Hugging Face: a BatchEncoding arrives as one, and Trainer trains and evaluates through the prefetcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from prefetch import CUDAPrefetcher

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script.*is deprecated"),  # of transformers, with newer torch
]

WORDS = ("[PAD]", "[UNK]", "one", "two", "three", "red")
TEXTS = [
    "one",
    "red two",
    "one two three",
    "red",
    "three three red two",
    "two",
    "one red",
    "three",
    "two one",
    "red red",
]


@pytest.fixture(name="tokenizer")
def _tokenizer() -> PreTrainedTokenizerFast:
    """One that knows six words."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture(name="samples")
def _samples(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Tokenised texts, and whether "red" is in them."""
    return [{**tokenizer(text), "labels": int("red" in text)} for text in TEXTS]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What Accelerate keeps for the whole process is forgotten."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_model() -> BertForSequenceClassification:
    """A tiny one, with the same weights each time."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **size, **no_dropout))


class Noting(Trainer):
    """Notes the token numbers of each batch that it trains on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        self.seen.append(inputs["input_ids"].tolist())
        loss: torch.Tensor = super().training_step(model, inputs, *rest)
        return loss


class Prefetching(Noting):
    """The same, with a look-ahead below the loaders that Accelerate has prepared."""

    def get_train_dataloader(self) -> Any:
        return self.prefetched(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.prefetched(super().get_eval_dataloader(eval_dataset))

    def prefetched(self, loader: Any) -> Any:
        loader.base_dataloader = CUDAPrefetcher(loader.base_dataloader, self.accelerator.device, background=True)
        return loader


def make_trainer(
    kind: type[Noting], tokenizer: Any, samples: list[dict[str, Any]], folder: Path, **options: Any
) -> Noting:
    """One that trains for two epochs of four batches, the last one shorter."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "learning_rate": 0.1,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return kind(
        model=make_model(),
        args=TrainingArguments(**(defaults | options)),
        train_dataset=samples,
        eval_dataset=samples,
        data_collator=DataCollatorWithPadding(tokenizer),
    )


def test_batch_encoding(sim: ModuleType, tokenizer: Any, samples: list[dict[str, Any]]) -> None:
    """A BatchEncoding arrives on the device as one, and a model computes on it what it does on the CPU."""
    data: Any = samples  # a list will do as a data set
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer), pin_memory=True
    )
    model = make_model().eval()
    with torch.no_grad():
        expected = [model(**batch).loss for batch in loader]
        model.to("sim")
        losses = []
        for batch in CUDAPrefetcher(loader, "sim"):
            assert type(batch) is BatchEncoding
            assert {tensor.device for tensor in batch.values()} == {torch.device("sim", 0)}
            losses.append(model(**batch).loss.cpu())
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_trainer(accumulated: int, tokenizer: Any, samples: list[dict[str, Any]], tmp_path: Path) -> None:
    """It trains on the same batches in the same order, to the same weights, as one without the prefetcher."""
    options = {"gradient_accumulation_steps": accumulated}
    trainers = [make_trainer(kind, tokenizer, samples, tmp_path, **options) for kind in (Noting, Prefetching)]
    for trainer in trainers:
        trainer.train()
    plain, prefetching = trainers
    assert len(plain.seen) == 8
    assert prefetching.seen == plain.seen
    assert prefetching.state.global_step == plain.state.global_step
    torch.testing.assert_close(prefetching.model.state_dict(), plain.model.state_dict())


def test_evaluation_has_all_samples(tokenizer: Any, samples: list[dict[str, Any]], tmp_path: Path) -> None:
    """No prediction is cut off, though the last batch is shorter."""
    trainer = make_trainer(Prefetching, tokenizer, samples, tmp_path)
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "evaluation")
    assert output.num_samples == len(TEXTS)
    assert output.label_ids.tolist() == [sample["labels"] for sample in samples]


@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")  # a trainer for the CPU pins nothing
def test_evaluation_with_the_prefetcher_outside(
    sim: ModuleType, tokenizer: Any, samples: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Around a prepared loader a look-ahead loses predictions: Accelerate hears of the end too early."""
    trainer = make_trainer(Noting, tokenizer, samples, tmp_path)
    batches = CUDAPrefetcher(trainer.get_eval_dataloader(), "sim")
    got = [len(trainer.accelerator.gather_for_metrics(batch["labels"])) for batch in batches]
    assert got == [3, 1, 3, 1]


def test_trainer_resumes(tokenizer: Any, samples: list[dict[str, Any]], tmp_path: Path) -> None:
    """From a checkpoint in mid-epoch it goes on with the batches that are left."""
    whole = make_trainer(Prefetching, tokenizer, samples, tmp_path, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = make_trainer(Prefetching, tokenizer, samples, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.seen == whole.seen[2:]
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())
