"""Files that users upload for batches, and files that batches write. Files are kept in memory, within limits for each
user and for all users together. With a state file, uploaded files are also saved in the state file. Users cannot access
the files of other users."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from bridle.errors import InvalidRequest, UnknownFile
from bridle.serving.outputs.saved_records import SavedRecords
from bridle.serving.tenancy.per_user_store import StoreBounds

#: Limits: seconds (a day), number of files of all users and of one, bytes of all users and of one.
BOUNDS = StoreBounds(86_400.0, 4_096, 256, 256 << 20, 64 << 20)
#: Limits with a state file, where files are kept for 30 days.
SAVED_BOUNDS = replace(BOUNDS, seconds=30 * 86_400.0)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a user. `created` and `expires` are Unix times; `purpose` is `batch` or `batch_output`."""

    user: str
    id: str
    created: int
    expires: int
    filename: str
    purpose: str
    content: bytes

    def fields(self) -> dict[str, Any]:
        """Return the file's metadata in the form that clients see."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore(SavedRecords[StoredFile]):
    """Keeps files. With a state `table`, the store also has the files that were saved there. Only one thread may use
    the store."""

    kind, unknown, noun, plural = StoredFile, UnknownFile, "file", "files"
    usual = BOUNDS
    advice = "files are kept for {:g} s, within bounds. Upload it again"

    def create(self, user: str, filename: str, purpose: str, content: bytes) -> StoredFile:
        """Store a new file. Raises `InvalidRequest` if the file is too large, and `Overloaded` if there is no room for
        it."""
        bounds, now = self.bounds, int(time.time())
        if len(content) > bounds.max_bytes_of_user // 2:
            most = bounds.max_bytes_of_user // 2
            raise InvalidRequest(
                f"file: got {len(content)} bytes; the server keeps at most {most} bytes. Split the file", "file"
            )
        made = StoredFile(
            user, f"file-{secrets.token_hex(12)}", now, now + int(bounds.seconds), filename, purpose, content
        )
        return self.put(made)
