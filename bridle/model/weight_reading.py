"""Reads weights into the model classes of transformers, with bridle's attention. Every weight must be in the
checkpoint. Code and pickles in a checkpoint are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bridle.errors import BridleError, UnsupportedModel
from bridle.load_progress import part_of
from bridle.model import attention
from bridle.model.checkpoint import Checkpoint
from bridle.model.staging import move_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: The share of the reading progress when tensors are located in their files; a GPU then gets them page by page.
_FOUND = 0.2

#: Held while transformers makes a model. Meanwhile transformers patches its own classes for all threads, and treats the
#: attributes that it finds as the originals. With two threads at once, one would leave a patch behind, and every later
#: model would lack weights.
making_model = Lock()


def read_weights(
    kind: Any,
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention_names: str | dict[str, str] = attention.ATTENTION_NAME,
    progress: Callable[[float], None] = lambda share: None,
    **options: Any,
) -> nn.Module:
    """Read the weights into the model class that `kind`, an auto class of transformers, selects. `options` are passed
    to that class. `progress` gets the share of bytes that were read."""
    attention.register()
    found = 1.0 if device.type == "cpu" else _FOUND
    try:
        with making_model, _quiet_library(), _counted(checkpoint.tensor_bytes, lambda share: progress(found * share)):
            model, loading = kind.from_pretrained(
                checkpoint.folder,
                config=settings,
                dtype=dtype,
                attn_implementation=attention_names,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # refused below, with a message that names the shapes
                output_loading_info=True,
                **options,
            )
    except BridleError:
        raise
    except Exception as error:
        raise UnsupportedModel(_why_not(settings, error)) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"{checkpoint.folder} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]!r}"
        )
    if loading["mismatched_keys"]:
        name, found, wanted = sorted(loading["mismatched_keys"])[0]
        raise UnsupportedModel(f"weight {name!r} has shape {tuple(found)}, but config.json implies {tuple(wanted)}")
    progress(found)  # a checkpoint may hold more tensors than were read
    model = model.requires_grad_(False).eval()
    return move_model(model, device, lambda share: progress(part_of(found, 1.0, share)))  # type: ignore[no-any-return]


def _why_not(settings: PreTrainedConfig, error: Exception) -> str:
    name = settings.model_type
    if isinstance(error, KeyError) and attention.ATTENTION_NAME in str(error):
        return f"model type {name!r} has its own attention that cannot use a paged cache"
    return f"model type {name!r} cannot be loaded: {type(error).__name__}: {error}"


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Disable the progress bars and load reports of transformers. If a weight is missing or unexpected, this module
    raises an error instead of a report."""
    from transformers.utils import logging as library_logging

    verbosity = library_logging.get_verbosity()
    bars = library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()


# -- how far it is -------------------------------------------------------------------------------------------

#: The function that counts the parameters that transformers places in this thread.
_counting: ContextVar[Callable[[Iterable[Any]], Iterator[Any]] | None] = ContextVar("counting", default=None)
_hook_lock, _num_hooked = Lock(), 0
_hook_before: Any = None


@contextmanager
def _counted(sizes: Mapping[str, int], progress: Callable[[float], None]) -> Iterator[None]:
    """Report to `progress` the share of a checkpoint's bytes that transformers has loaded, through transformers' hook
    for progress bars. `sizes` are the bytes of the tensors, by name. The hook is global to the process, and is set as
    long as any thread reads weights. Each thread counts only the tensors that it reads."""
    token = _counting.set(lambda items: _count(items, sizes, progress))
    _hook(1)
    try:
        yield
    finally:
        _hook(-1)
        _counting.reset(token)


def _hook(change: int) -> None:
    global _num_hooked, _hook_before
    from transformers.utils import logging as library_logging

    with _hook_lock:
        if _num_hooked == 0:
            _hook_before = library_logging.set_tqdm_hook(_make_bar)
        _num_hooked += change
        if _num_hooked == 0:
            library_logging.set_tqdm_hook(_hook_before)


def _make_bar(factory: Any, args: Any, settings: Any) -> Any:
    """Return a progress bar for transformers. For a thread that reads weights, the progress bar is an iterator that
    counts loaded parameters."""
    count = _counting.get()
    if count is not None and args and settings.get("desc") == "Loading weights":
        return count(args[0])
    return factory(*args, **settings) if _hook_before is None else _hook_before(factory, args, settings)


def _count(items: Iterable[Any], sizes: Mapping[str, int], progress: Callable[[float], None]) -> Iterator[Any]:
    """Yield the items: a parameter's name, and the tensors that it is made from. Report progress after each item."""
    total, done = max(sum(sizes.values()), 1), 0
    for name, made in items:
        sources = [source for names in made.layer_targets.values() for source in names]
        done += sum(sizes.get(source, 0) for source in sources)
        yield name, made
        progress(min(done / total, 1.0))
