"""The control runtime: a process that hosts sandboxed controllers for an engine.

The supervisor process owns the channels, the module store and all limits, and runs no Wasm. A fork server starts the
other processes for the supervisor. Only compiler processes compile modules; worker processes only load compiled code.
"""
