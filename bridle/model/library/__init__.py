"""The models that `bridle pull` knows by short names: their sources, and the copies in this user's folder. No torch."""

from bridle.model.library.entries import DEFAULT_MODEL, LibraryEntry, Wheel, find_entry, library_entries
from bridle.model.library.store import installed_entries, installed_path, models_folder, pull_entry, remove_entry

__all__ = [
    "DEFAULT_MODEL",
    "LibraryEntry",
    "Wheel",
    "find_entry",
    "installed_entries",
    "installed_path",
    "library_entries",
    "models_folder",
    "pull_entry",
    "remove_entry",
]
