"""AICI: the protocol between an engine and a control runtime, both of its sides.

`protocol` (messages), `channels` (shared memory) and `masks` (bias rows) are common to both sides; `runtime` is the
process that hosts controllers. Nothing here imports the engine.
"""
