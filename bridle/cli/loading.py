"""Load a model while showing how far it is. The bar goes to stderr, so that stdout holds only results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridle.config import EngineConfig, ModelConfig
    from bridle.service.loading import LoadedModel


@contextmanager
def loaded_model(config: ModelConfig, engine_config: EngineConfig | None = None) -> Iterator[LoadedModel]:
    """The model of `config`, ready to generate, closed on leaving. Raises what loading raises."""
    with progress_bar(f"Loading {config.model}") as progress:
        from bridle.service.loading import load_model

        model = load_model(config, engine_config, progress=progress)
    try:
        yield model
    finally:
        model.close()


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """A callback (what is being done, share done) that moves a bar; it disappears when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)

        def report(stage: str, share: float) -> None:
            bar.update(task, description=f"{title}: {stage}" if stage else title, completed=share)

        yield report
