"""LoRA adapters for llama.cpp: the weights of PEFT adapters are written to a file in llama.cpp's format. llama.cpp's
format has its own tensor names and its own order of query and key rows. The scale of each layer is multiplied into B.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bridle.errors import AdapterRefused, InternalError
from bridle.gguf import GgufModel
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Config
from bridle.gguf.rows import file_order
from bridle.gguf.rules import Order, TensorRule
from bridle.llamacpp.library import Model
from bridle.lora import AdapterFiles, LayerShape
from bridle.lora.weights import HostAdapter, read_weights
from bridle.threads import run_in_thread


class LlamaAdapters:
    """Implements `bridle.lora.AdapterDevice`. An adapter on the host is the contents of its file; an adapter on the
    device is llama.cpp's handle. The adapters on the device do not change while a caller holds `lock`."""

    #: Adapters that were read are never lost, so the epoch never changes.
    epoch = 0

    def __init__(self, model: Model, source: GgufModel, family: GgufFamily | None, config: Config) -> None:
        self.lock = Lock()
        self._model = model
        self._places = dict(_places(source, family, config))
        self.layers: Mapping[str, LayerShape] = {name: place[1] for name, place in self._places.items()}
        self._arch = "" if family is None else family.arch
        self._config = SimpleNamespace(**config)
        self._on_host: dict[str, HostAdapter] = {}
        self._on_device: dict[str, Any] = {}

    def read(self, key: str, files: AdapterFiles) -> None:
        """Read an adapter from disk to the host. Raises `AdapterRefused`."""
        self._on_host[key] = run_in_thread(lambda: read_weights(files))

    def place(self, key: str) -> None:
        """Load an adapter from the host into llama.cpp. Raises `AdapterRefused`."""
        adapter = self._on_host.get(key)
        if adapter is None:
            raise InternalError(f"adapter {key!r} cannot be placed on the device, because its files were not read")
        with tempfile.TemporaryDirectory(prefix="bridle-adapter-") as folder:
            path = Path(folder) / "adapter.gguf"
            self._write(path, adapter)
            with self.lock:
                handle = self._model.read_adapter(path)
                if handle:
                    self._on_device[key] = handle
        if not handle:
            raise AdapterRefused("llama.cpp cannot load the adapter; see the log for the reason", "source")

    def displace(self, key: str) -> None:
        with self.lock:
            handle = self._on_device.pop(key, None)
            if handle is not None:
                self._model.free_adapter(handle)

    def drop(self, key: str) -> None:
        self._on_host.pop(key, None)

    def clear(self) -> None:
        for key in list(self._on_device):
            self.displace(key)
        self._on_host.clear()

    @contextmanager
    def applied(self, key: str | None) -> Iterator[None]:
        """While the `with` block runs, llama.cpp computes with this adapter. Raises `InternalError` if the adapter is
        not on the device."""
        if key is None:
            yield
            return
        if key not in self._on_device:
            raise InternalError(f"adapter {key!r} is used, but is not on the device")
        self._model.use_adapter(self._on_device[key])
        try:
            yield
        finally:
            self._model.use_adapter(None)

    def _write(self, path: Path, adapter: HostAdapter) -> None:
        from gguf import GGUFWriter

        writer = GGUFWriter(path, self._arch)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 0.0)  # no scale in addition to the one in B
        for layer, shape in adapter.files.shapes.items():
            name, _, rule = self._places[layer]
            a, b = adapter.pair(layer)  # [rank, in], [out, rank]
            writer.add_tensor(f"{name}.lora_a", self._ordered(a.float(), rule.columns, 1).numpy())
            writer.add_tensor(f"{name}.lora_b", self._ordered(b.float() * shape.scale, rule.order, 0).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _ordered(self, matrix: Tensor, order: Order, dim: int) -> Tensor:
        rows = file_order(order, matrix.shape[dim], self._config)
        return (matrix if rows is None else matrix.index_select(dim, rows)).contiguous()


_Place = tuple[str, LayerShape, TensorRule]  # the file's tensor and the layer's shape


def _places(source: GgufModel, family: GgufFamily | None, config: Config) -> Iterator[tuple[str, _Place]]:
    """Yield the weights that adapters may change: the matrices of each layer, without experts and the output head."""
    for rule in () if family is None else family.rules:
        if "{}" not in rule.model or len(rule.file) != 1:
            continue
        if (
            family is not None and family.layout == "latent" and ".attn_" in rule.file[0]
        ):  # products that llama.cpp cannot adapt
            continue
        for layer in range(config["num_hidden_layers"]):
            name = rule.file[0].format(layer) + ".weight"
            entry = source.tensors.get(name)
            if entry is not None and len(entry.shape) == 2 and "ffn_gate_inp" not in name:
                num_outputs, num_inputs = entry.shape
                shape = LayerShape(num_inputs, num_outputs, False)
                yield rule.model.format(layer), (name, shape, rule)
