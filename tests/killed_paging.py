"""Trains a network whose tensors lie in files, in processes that are killed amid a copy.

`python tests/killed_paging.py train FOLDER STEPS AT` resumes from the checkpoint in the folder, if
there is one, trains to so many steps, saves after each, and is killed amid its copy number AT.
`python tests/killed_paging.py forked FOLDER STEPS` trains two steps, has a forked process killed
amid each copy of the third, and trains on; it prints how many were. First a forked process, and one
that this one forks, change parameters of their own.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paged_training import batch, bits, load, paged, perceptron
from training import assert_same_bits


def dying(at: int) -> None:
    """From now on the process is killed when half of its copy of this number is made."""
    numbers = itertools.count(1)
    for name in ("pwrite", "preadv"):
        known: Callable[..., int] = getattr(os, name)

        def copied(descriptor: int, given: Any, offset: int, known: Any = known) -> int:
            if next(numbers) < at:
                return known(descriptor, given, offset)  # type: ignore[no-any-return]
            half = given[0] if isinstance(given, list) else given
            half = half[: len(half) // 2]
            known(descriptor, [half] if isinstance(given, list) else half, offset)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        setattr(os, name, copied)


def trained_one(step: Any, made: tuple[Any, Any], number: int) -> None:
    step(*made, *batch(torch.Generator().manual_seed(number)))


def save(made: tuple[Any, Any], number: int, path: Path) -> None:
    new = path.with_suffix(".new")
    torch.save([number, [one.state_dict() for one in made]], new)
    new.replace(path)


def train(folder: Path, steps: int, at: int) -> None:
    checkpoint, first = folder / "checkpoint.pt", 0
    made = perceptron()
    if checkpoint.exists():
        first, states = torch.load(checkpoint)
        load(made, states)
    step = paged(folder / "tier")
    if at:
        dying(at)
    for number in range(first, steps):
        trained_one(step, made, number)
        save(made, number + 1, checkpoint)


def inherit(made: tuple[Any, Any], step: Any) -> None:
    """Forks a process that changes parameters by hand, which forks one that does it by a step."""
    before = [one.detach().clone() for one in made[0].parameters()]

    def are_more(by: float) -> bool:
        return all(map(torch.equal, made[0].parameters(), [one + by for one in before]))

    child = os.fork()
    if not child:
        with torch.no_grad():
            for one in made[0].parameters():
                one.add_(1)
        if grandchild := os.fork():
            _, status = os.waitpid(grandchild, 0)
            os._exit(status != 0 or not are_more(1))
        is_inherited = are_more(1)
        trained_one(step, made, 2)
        os._exit(not is_inherited or are_more(1))
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert are_more(0)


def forked(folder: Path, steps: int) -> int:
    made, step = perceptron(), paged(folder / "tier")
    for number in range(2):
        trained_one(step, made, number)
    save(made, 2, folder / "checkpoint.pt")
    before = bits(*made)
    inherit(made, step)
    assert_same_bits(before, bits(*made))
    for at in itertools.count(1):
        child = os.fork()
        if not child:
            dying(at)
            trained_one(step, made, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert_same_bits(before, bits(*made))
        assert not list((folder / "tier").iterdir())
    for number in range(2, steps):
        trained_one(step, made, number)
    save(made, steps, folder / "end.pt")
    return at - 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        print(forked(Path(sys.argv[2]), int(sys.argv[3])))
