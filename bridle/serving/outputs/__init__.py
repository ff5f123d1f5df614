"""From events of the engine to what clients read: outputs, deltas, stored responses."""
