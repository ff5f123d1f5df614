"""Trains the demo model that sees: `python -m lab.demo.seeing.train --output FOLDER`.

The same command continues a run that was interrupted. One thread is enough.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lab.demo.seeing.tokenizer import train_tokenizer
from lab.demo.seeing.trainer import SeeingRecipe, SeeingTrainer
from lab.demo.train import run


def main() -> None:
    """Parses the command line, trains or continues, and writes the model folder."""
    standard = SeeingRecipe()
    parser = argparse.ArgumentParser(prog="python -m lab.demo.seeing.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: OUTPUT.work)")
    parser.add_argument("--seed", type=int, default=standard.seed, help="default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = SeeingTrainer(SeeingRecipe(seed=options.seed), train_tokenizer(options.seed))
    run(trainer, options.work or options.output.with_name(options.output.name + ".work"), options.checkpoint_every)
    trainer.export(options.output)


if __name__ == "__main__":
    main()
