"""Control vectors: directions that are added to the hidden states between layers, with scales that each request sets.

The package reads and writes files of control vectors, and stores the control vectors of one model by name. The package
handles neither requests nor step plans. Importing the package does not import torch; its modules with tensors do.
"""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.control_vectors.files import Directions as Directions
    from bridle.control_vectors.files import read_vector as read_vector
    from bridle.control_vectors.files import write_vector as write_vector
    from bridle.control_vectors.store import ControlVectorInfo as ControlVectorInfo
    from bridle.control_vectors.store import ControlVectors as ControlVectors
else:
    __getattr__, __all__ = lazy_names(
        __name__, {"files": "Directions read_vector write_vector", "store": "ControlVectorInfo ControlVectors"}
    )
