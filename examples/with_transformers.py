"""Hugging Face: a ``Trainer`` whose loaders are prefetched.

    pip install -e . transformers accelerate  # once, in a clone of the project
    python examples/with_transformers.py      # a tokenizer and a model made here: nothing to download

The trainer's loaders are prepared by Accelerate: the prefetcher goes below what that returns, as in
``with_accelerate.py``. Batches are ``BatchEncoding`` objects, there and here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from example_options import parse
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from prefetch import CUDAPrefetcher

WORDS = ("[PAD]", "[UNK]", "one", "two", "three", "four", "red", "blue")


class PrefetchingTrainer(Trainer):  # type: ignore[misc] # its class may not be known
    """A trainer whose batches for training and evaluation are copied ahead."""

    def get_train_dataloader(self) -> Any:
        """See ``Trainer``."""
        return self.prefetched(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """See ``Trainer``."""
        return self.prefetched(super().get_eval_dataloader(eval_dataset))

    def prefetched(self, loader: Any) -> Any:
        """A loader that Accelerate has prepared, with the prefetcher in it; the trainer may come with one again."""
        if not isinstance(loader.base_dataloader, CUDAPrefetcher):
            loader.base_dataloader = CUDAPrefetcher(loader.base_dataloader, self.accelerator.device)
        return loader


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One that knows eight words."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def make_samples(tokenizer: PreTrainedTokenizerFast, count: int) -> list[dict[str, Any]]:
    """Texts of different lengths, and whether the word "red" is in them."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(count):
        length = int(torch.randint(2, 8, (), generator=generator))
        words = [WORDS[i] for i in torch.randint(2, len(WORDS), (length,), generator=generator).tolist()]
        samples.append({**tokenizer(" ".join(words)), "labels": int("red" in words)})
    return samples


def main(argv: Sequence[str] | None = None) -> None:
    """Train, then evaluate."""
    device, steps = parse(argv, "Train a tiny BERT with Trainer.", steps=40, has_index=False)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrefetchingTrainer(
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=32,
                learning_rate=1e-2,
                use_cpu=device.type == "cpu",
                dataloader_pin_memory=device.type != "cpu",
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=make_samples(tokenizer, 640),
            eval_dataset=make_samples(tokenizer, 64),
            data_collator=DataCollatorWithPadding(tokenizer),
        )
        trainer.train()
        print(f"loss of the evaluation: {trainer.evaluate()['eval_loss']:.3f}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{len(losses)} steps on {trainer.args.device}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
