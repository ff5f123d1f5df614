"""Converts events of the engine to outputs, deltas and stored responses."""
