"""Train a small Hugging Face GPT-2 on several processes, beside the same model on a single device.

    torchrun --nproc-per-node 4 examples/train_gpt2.py

The text is the prose of Python's own documentation, read byte by byte.  Rank 0 first trains the model on one
device; then all ranks train it together, each on its own rows of the same batches, and the losses stand side by side.
The same code runs on CPU with gloo and on CUDA with NCCL.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import autopar


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--seq", type=int, default=64, help="bytes in a row")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tp, fsdp+tp, …")
    parser.add_argument("--mem-gb", type=float, default=4.0, help="GiB that one device may use")
    parser.add_argument("--out", default="demo_out", help="folder for the rewritten graph and the plan")
    return parser.parse_args()


def build_model(width: int, layers: int, seq: int) -> GPT2LMHeadModel:
    """A GPT-2 over bytes with random weights.  Without dropout, so that both runs can be compared."""
    config = GPT2Config(
        vocab_size=256, n_positions=seq, n_embd=width, n_layer=layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def global_batches(steps: int, rows: int, seq: int) -> Iterator[torch.Tensor]:
    """`steps` random batches of the text, int64 of shape (rows, seq), the same on every rank."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - seq, (rows, 1), generator=generator)
        yield text[starts + torch.arange(seq)]


def train(
    model: nn.Module, batches: Iterator[torch.Tensor], lr: float, report: Callable[[int, float], None]
) -> list[float]:
    """An ordinary training loop.  Returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step, ids in enumerate(batches):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    return losses


def main() -> None:
    arguments = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def show(text: object) -> None:
        if rank == 0:
            print(text, flush=True)

    def batches(part: int = 0, num_parts: int = 1) -> Iterator[torch.Tensor]:
        for ids in global_batches(arguments.steps, arguments.rows, arguments.seq):
            yield ids.chunk(num_parts)[part].to(device)

    model = build_model(arguments.width, arguments.layers, arguments.seq).to(device)
    single: list[float] = []
    if rank == 0:
        show(f"training on a single device, {arguments.steps} steps …")
        single = train(copy.deepcopy(model), batches(), arguments.lr, lambda _step, _loss: None)

    mesh = init_device_mesh(device.type, (num_ranks,))
    example = next(batches(rank, num_ranks))
    pm = autopar.parallelize(
        model, mesh, arguments.mem_gb,
        strategy=arguments.strategy, example_inputs=((), {"input_ids": example, "labels": example}),
    )  # fmt: skip
    show(pm.plan)

    show(f"training on {num_ranks} processes\n\n{'step':>6}{'loss':>10}{'single':>10}{'difference':>12}")

    def report(step: int, loss: float) -> None:
        if rank == 0 and (step % 5 == 0 or step == arguments.steps - 1):
            show(f"{step:>6}{loss:>10.5f}{single[step]:>10.5f}{abs(loss - single[step]):>12.1e}")

    losses = train(pm, batches(rank, num_ranks), arguments.lr, report)
    pm.export(arguments.out)
    if rank == 0:
        worst = max(abs(a - b) for a, b in zip(losses, single, strict=True))
        show(f"\nlargest difference from the single device over {arguments.steps} steps: {worst:.1e}")
        show(f"the rewritten graph, the plan and a picture are in {arguments.out}/")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
