"""The settings of all benchmarks. Each benchmark reads only the settings that it uses; `threads` is set for all
benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings. If `model_sizes` or `batches` is empty, or `threads` is None, the benchmark chooses the value."""

    quick: bool = False
    model_sizes: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    threads: int | None = None
    as_json: bool = False
    lmql: Path | None = None  # an environment with the original LMQL
    report: Path | None = None  # a page to write the report to
    parts: tuple[str, ...] = ()  # parts of the names of phases to run; empty: all
    folder: Path | None = None  # keeps files and results, so that a later run continues
    models: tuple[str, ...] = ()  # files or folders
    llama_server: Path | None = None  # llama.cpp's programs
    llama_bench: Path | None = None
    num_cases: int | None = None  # cases of each recipe
    minutes: float | None = None  # minutes for which a server is under traffic
    front_ends: int = 1  # processes that write streams


def set_up(settings: BenchSettings, threads: int | None = None) -> None:
    """Set the number of threads: the number in the settings, or else `threads`. Also silence transformers. Raises
    `InvalidRequest` for an invalid number of threads."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = threads if settings.threads is None else settings.threads
    if wanted is not None:
        if wanted < 1:
            raise InvalidRequest(f"threads is {wanted}; must be at least 1", "threads")
        torch.set_num_threads(wanted)
