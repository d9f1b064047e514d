"""Train a Hugging Face model by the `Trainer` on several processes: evaluation, clipping, schedule, save and resume.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --out run
    torchrun --nproc-per-node 4 examples/hf_trainer.py --out run --steps 60 --resume

The second line goes on from the last checkpoint of the first, on another number of processes.  Without `torchrun` the
same file trains on a single device by the plain `Trainer`, with the same losses.  `AutoparTrainer` is all that a script
of one's own needs.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autopar

SEQ = 32


class AutoparTrainer(Trainer):
    """The `Trainer` of a `ParallelModule`.

    `TrainingArguments` need `label_names` and `remove_unused_columns=False`: both are otherwise read off the signature
    of the model, and that of a `ParallelModule` takes anything.
    """

    def __init__(self, model: autopar.ParallelModule, args: TrainingArguments, **options: Any) -> None:
        super().__init__(model, args, **options)
        kinds = {p.kind for p in inspect.signature(model.original_module.forward).parameters.values()}
        self.model_accepts_loss_kwargs = inspect.Parameter.VAR_KEYWORD in kinds

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss is that of all ranks' rows already: nothing of it is to be scaled by their number, as with DDP."""
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The weights as `from_pretrained` reads them; every rank comes here."""
        self.model.save_pretrained(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        scheduler = self.lr_scheduler.state_dict()
        autopar.save_checkpoint(f"{output_dir}/autopar", self.model, self.optimizer, extra={"scheduler": scheduler})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Parameters come with the optimizer's state, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extra = autopar.load_checkpoint(f"{checkpoint}/autopar", self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_best_model(self) -> None:
        self.model.load_pretrained(self.state.best_model_checkpoint)


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Stretches of Python's own documentation, byte by byte."""

    def __init__(self, first: int, last: int) -> None:
        text = "\n".join(topics.values()).encode()
        self.rows = torch.tensor(list(text[first * SEQ : last * SEQ])).view(-1, SEQ)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build_model() -> GPT2LMHeadModel:
    """A small GPT-2 over bytes, without dropout so that runs can be compared."""
    config = GPT2Config(
        vocab_size=256, n_positions=SEQ, n_embd=48, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # read off the class's name otherwise, which says nothing of it
    return model


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=16, help="rows in a micro-batch of all ranks together")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tp, fsdp+tp, …")
    parser.add_argument("--mem-gb", type=float, default=4.0, help="GiB that one device may use")
    parser.add_argument("--out", default="trainer_out", help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args(argv)

    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = TrainingArguments(
        output_dir=arguments.out, max_steps=arguments.steps, per_device_train_batch_size=arguments.rows // num_ranks,
        per_device_eval_batch_size=arguments.rows // num_ranks, gradient_accumulation_steps=2, max_grad_norm=1.0,
        learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1, logging_nan_inf_filter=False,
        eval_strategy="steps", eval_steps=arguments.save_every, save_steps=arguments.save_every,
        load_best_model_at_end=True, metric_for_best_model="loss",
        label_names=["labels"], remove_unused_columns=False, dataloader_drop_last=True, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    model = build_model()
    kind, trained = Trainer, model
    if num_ranks > 1:  # `TrainingArguments` have started torch.distributed
        mesh = init_device_mesh(settings.device.type, (num_ranks,))
        trained = autopar.parallelize(
            model.to(settings.device), mesh, arguments.mem_gb, strategy=arguments.strategy, accumulate=2
        )
        kind = AutoparTrainer
    trainer = kind(trained, settings, train_dataset=Lines(0, 1000), eval_dataset=Lines(1000, 1064))
    trainer.train(resume_from_checkpoint=arguments.resume)
    if num_ranks > 1 and trainer.is_world_process_zero():
        print(trained.plan)
    return trainer.state.log_history


if __name__ == "__main__":
    main()
