"""The control runtime: a process that hosts sandboxed controllers for an engine.

Processes: the supervisor owns the channels, the module store and all limits and runs no Wasm. For the supervisor, a
fork server starts compilers (the only processes that compile) and workers (which only load compiled code).
"""
