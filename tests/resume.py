"""Half a run, in a process of its own: ``resume.py PART FOLDER`` runs steps 0-9 or 10-19 and hands
over by checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import roam
from training import gpt2, state_of, tensors_and_numbers


def main(part: int, folder: Path) -> None:
    torch.manual_seed(0)
    training = gpt2()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    if part:
        states, torch_state, data_state = torch.load(folder / "checkpoint.pt")
        for holder, state in zip(training.objects, states, strict=True):
            holder.load_state_dict(state)
        torch.set_rng_state(torch_state)
        generator.set_state(data_state)
    step = roam.compile(training.step)
    losses = []
    for _ in range(10):
        losses += tensors_and_numbers(step(*training.objects, *training.batch(generator)))
        for schedule in training.objects[2:]:
            schedule.step()
    torch.save(losses, folder / f"losses-{part}.pt")
    if part:
        torch.save(state_of(training), folder / "end.pt")
    else:
        states = [holder.state_dict() for holder in training.objects]
        torch.save([states, torch.get_rng_state(), generator.get_state()], folder / "checkpoint.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
