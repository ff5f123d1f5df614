"""The models that `bridle pull` knows by short names: where they are downloaded from, and the copies in this user's
folder. Does not import torch."""

from bridle.model.library.entries import DEFAULT_MODEL as DEFAULT_MODEL
from bridle.model.library.entries import LibraryEntry as LibraryEntry
from bridle.model.library.entries import Wheel as Wheel
from bridle.model.library.entries import find_entry as find_entry
from bridle.model.library.entries import library_entries as library_entries
from bridle.model.library.store import installed_entries as installed_entries
from bridle.model.library.store import installed_path as installed_path
from bridle.model.library.store import models_folder as models_folder
from bridle.model.library.store import pull_entry as pull_entry
from bridle.model.library.store import remove_entry as remove_entry
