"""Stores the figures of finished parts in a file in a folder, as one line of JSON for each part.

A later run uses a line that was measured under the same conditions: the processor, threads, versions, and `--quick`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from bridle.bench.run import conditions
from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest

_FILE = "figures.jsonl"


class Store:
    """The stored figures in `folder`."""

    def __init__(self, folder: Path, settings: BenchSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._conditions = conditions(settings)
        self._records = {record["part"]: record for record in self._read()}

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        try:
            records = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
            return [record for record in records if record["conditions"] == self._conditions]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{self._path} is damaged ({error}); remove it", "folder") from None

    def find(self, part: str) -> dict[str, Any] | None:
        """Return the stored record of a part, or None."""
        return self._records.get(part)

    def keep(self, record: dict[str, Any], seconds: float) -> None:
        """Store the record of a part that took `seconds`. The machine's load average is stored as well."""
        plain = {key: asdict(value) if is_dataclass(value) else value for key, value in record.items()}  # type: ignore[arg-type]
        plain |= {"seconds": seconds, "at": time.time(), "load": os.getloadavg()[0], "conditions": self._conditions}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
        self._records[plain["part"]] = plain
