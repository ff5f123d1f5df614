"""Trains the demo model: `python -m lab.demo.train --output FOLDER`.

The same command continues a run that was interrupted. On a CPU with bf16 matrix units one thread is enough.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lab.demo.tokenizer import train_tokenizer
from lab.demo.trainer import Course, Recipe, Trainer, checkpoints


def run(trainer: Course[Any, Any], work: Path, checkpoint_every: int, log_every: int = 50) -> None:
    """Trains to the end of the recipe, showing progress and saving checkpoints on the way.

    Goes on from the newest checkpoint in `work`.
    """
    if found := checkpoints(work):
        trainer.load_checkpoint(found[-1])
    console = Console()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(),
    TextColumn("loss {task.fields[loss]:.4f}"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=trainer.recipe.steps, completed=trainer.num_done, loss=float("nan"))
        recent: list[float] = []
        began = time.monotonic()
        while trainer.num_done < trainer.recipe.steps:
            recent.append(trainer.step())
            progress.update(task, completed=trainer.num_done, loss=recent[-1])
            if trainer.num_done % log_every == 0:
                mean, seconds = sum(recent) / len(recent), (time.monotonic() - began) / len(recent)
                console.log(f"step {trainer.num_done}: loss {mean:.4f}, {seconds:.2f} s a step")
                recent, began = [], time.monotonic()
            if trainer.num_done % checkpoint_every == 0:
                trainer.save_checkpoint(work)
    trainer.save_checkpoint(work)


def main() -> None:
    """Parses the command line, trains or continues, and writes the model folder."""
    standard = Recipe()
    parser = argparse.ArgumentParser(prog="python -m lab.demo.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: OUTPUT.work)")
    parser.add_argument("--seed", type=int, default=standard.seed, help="default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="compile the model; needs a C++ compiler, some 15 %% faster"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = Recipe(seed=options.seed)
    trainer = Trainer(recipe, train_tokenizer(recipe.seed, recipe.tokenizer_documents), options.device, options.compile)
    work = options.work or options.output.with_name(options.output.name + ".work")
    run(trainer, work, options.checkpoint_every)
    trainer.export(options.output)


if __name__ == "__main__":
    main()
