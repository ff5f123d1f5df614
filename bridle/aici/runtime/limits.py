"""All limits of the runtime. Each limit is configurable, and its error names it.

The first group has the names and defaults of the original runtime's options; the other limits are bridle's own.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Limits of the runtime. Times are in milliseconds, sizes in bytes."""

    max_forks: int = 16  # sequences of a request alive at the same time
    max_memory: int = 64 * MIB  # linear memory of an instance
    max_pre_step_time: int = 4  # D1: one post_pre_process
    max_step_time: int = 25  # one mid_process; 150 when the engine speaks D1
    max_init_time: int = 1000  # one instantiate
    max_timeout_steps: int = 10  # steps in a row that a controller may be late, in its own processor time

    # Limits of one callback.
    max_wasm_stack: int = 1 << 20
    max_log: int = 64 << 10  # bytes of log kept per report
    max_result: int = 4 * MIB  # JSON text that a callback returns
    max_masks: int = 64  # bias calls in one callback
    max_tokenize: int = 1 * MIB  # bytes tokenized at once
    max_tokenize_total: int = 4 * MIB  # bytes tokenized in one callback
    max_storage_commands: int = 256  # per callback
    max_forced_tokens: int = 16384  # forced tokens of one answer
    max_branch_splices: int = 1024
    max_bias_entries: int = 4096
    max_draft: int = 4096  # tokens that a branch proposes to draft; bridle's engine has the same limit
    max_constraints: int = 32  # constraint handles alive in an instance
    max_constraint_spec: int = 1 * MIB
    max_call_time: int = 10_000  # CPU time of a single callback, even if the engine allows more

    # Limits of a sequence over its whole life.
    max_rewound_tokens: int = 65536
    max_waits: int = 100_000  # noops in a row
    max_total_forks: int = 256  # sequences of a request in total, ended ones included

    # Shared variables of a request.
    max_variables: int = 256
    max_variable_name: int = 256
    max_variable_bytes: int = 4 * MIB  # bytes of all values together

    # Modules.
    max_module_bytes: int = 128 * MIB
    max_modules: int = 4096
    max_modules_per_user: int = 512
    max_store_bytes: int = 8 * GIB
    max_tags_per_user: int = 1024
    max_compiled_bytes: int = 8 * GIB
    max_compile_time: int = 10_000
    max_compile_memory: int = 2 * GIB
    max_compiles: int = 2  # compilations at the same time
    max_shipped_compile_time: int = 600_000  # for a controller that comes with bridle
    # wait of a request for a controller that is being compiled, before it is refused with a retry time
    max_prepare_wait: int = 2_000

    # Arguments and processes.
    max_argument: int = 16 * MIB
    max_prompt: int = 1 << 20
    max_workers: int = 8  # processes that sequences of a tenant share
    max_processes: int = 128  # processes of one request, or of one sequence
    max_instances: int = 1024  # instances alive in the whole runtime
    max_instances_per_user: int = 512
    max_unbound_time: int = 600_000  # age of an instance that no sequence has claimed
    max_queue_time: int = 2_000  # wait for a worker
    max_pending_side: int = 256  # pending requests on the side channel
    #: A worker that does not answer is killed when it used this much more processor time than its guests may use,
    max_silence: int = 3_000
    #: or when it got no processor time at all for this long.
    max_standstill: int = 30_000


DEFAULT_LIMITS = RuntimeLimits()
