from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOST: _ClassVar[AdapterTier]
    DEVICE: _ClassVar[AdapterTier]
HOST: AdapterTier
DEVICE: AdapterTier

class DiscoverRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiscoverReply(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("protocol", "version", "instance", "pid", "rank", "num_ranks", "model", "vocab_size", "max_model_len", "num_blocks", "block_size", "kv", "eos_token_ids", "dtype", "device", "max_num_batched_tokens", "max_num_seqs", "num_bytes", "adapter_layers", "embedding_size", "task", "block_bytes", "media_row_bytes", "media_max_bytes", "unnamed", "num_states", "state_bytes", "num_layers", "hidden_size")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNNAMED_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    instance: str
    pid: int
    rank: int
    num_ranks: int
    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    device: str
    max_num_batched_tokens: int
    max_num_seqs: int
    num_bytes: int
    adapter_layers: _containers.RepeatedCompositeFieldContainer[AdapterLayer]
    embedding_size: int
    task: str
    block_bytes: int
    media_row_bytes: int
    media_max_bytes: int
    unnamed: _containers.RepeatedScalarFieldContainer[int]
    num_states: int
    state_bytes: int
    num_layers: int
    hidden_size: int
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., instance: _Optional[str] = ..., pid: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., kv: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_bytes: _Optional[int] = ..., adapter_layers: _Optional[_Iterable[_Union[AdapterLayer, _Mapping]]] = ..., embedding_size: _Optional[int] = ..., task: _Optional[str] = ..., block_bytes: _Optional[int] = ..., media_row_bytes: _Optional[int] = ..., media_max_bytes: _Optional[int] = ..., unnamed: _Optional[_Iterable[int]] = ..., num_states: _Optional[int] = ..., state_bytes: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class AdapterLayer(_message.Message):
    __slots__ = ("name", "in_features", "out_features", "is_transposed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    IS_TRANSPOSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    in_features: int
    out_features: int
    is_transposed: bool
    def __init__(self, name: _Optional[str] = ..., in_features: _Optional[int] = ..., out_features: _Optional[int] = ..., is_transposed: _Optional[bool] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthReply(_message.Message):
    __slots__ = ("instance", "num_steps", "is_taken", "step_seconds")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    num_steps: int
    is_taken: bool
    step_seconds: float
    def __init__(self, instance: _Optional[str] = ..., num_steps: _Optional[int] = ..., is_taken: _Optional[bool] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class WarmUpRequest(_message.Message):
    __slots__ = ("num_tokens", "num_seqs")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_seqs: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_seqs: _Optional[int] = ...) -> None: ...

class WarmUpReply(_message.Message):
    __slots__ = ("num_tokens", "seconds", "decode_seconds", "num_seqs")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    seconds: float
    decode_seconds: float
    num_seqs: int
    def __init__(self, num_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., num_seqs: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source", "root", "digest", "tier")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    root: str
    digest: str
    tier: AdapterTier
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., root: _Optional[str] = ..., digest: _Optional[str] = ..., tier: _Optional[_Union[AdapterTier, str]] = ...) -> None: ...

class LoadAdapterReply(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "tier")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    name: str
    tier: AdapterTier
    def __init__(self, name: _Optional[str] = ..., tier: _Optional[_Union[AdapterTier, str]] = ...) -> None: ...

class UnloadAdapterReply(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class MediumPart(_message.Message):
    __slots__ = ("head", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: MediumHead
    data: bytes
    def __init__(self, head: _Optional[_Union[MediumHead, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class MediumHead(_message.Message):
    __slots__ = ("key", "num_rows", "arrays")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    num_rows: int
    arrays: _containers.RepeatedCompositeFieldContainer[MediumArray]
    def __init__(self, key: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[MediumArray, _Mapping]]] = ...) -> None: ...

class MediumArray(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class EncodeMediumReply(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class DropMediumRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class DropMediumReply(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("plan", "batch", "reset", "load_adapter", "unload_adapter", "embed", "medium_part", "medium_ready", "drop_medium", "control_vector")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_PART_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_READY_FIELD_NUMBER: _ClassVar[int]
    DROP_MEDIUM_FIELD_NUMBER: _ClassVar[int]
    CONTROL_VECTOR_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    batch: Batch
    reset: Reset
    load_adapter: LoadAdapterRequest
    unload_adapter: UnloadAdapterRequest
    embed: Embed
    medium_part: MediumPart
    medium_ready: bytes
    drop_medium: DropMediumRequest
    control_vector: ControlVector
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapterRequest, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapterRequest, _Mapping]] = ..., embed: _Optional[_Union[Embed, _Mapping]] = ..., medium_part: _Optional[_Union[MediumPart, _Mapping]] = ..., medium_ready: _Optional[bytes] = ..., drop_medium: _Optional[_Union[DropMediumRequest, _Mapping]] = ..., control_vector: _Optional[_Union[ControlVector, _Mapping]] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControlVector(_message.Message):
    __slots__ = ("key", "layers", "values")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    key: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, key: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("step", "seq_ids", "starts", "num_scheduled", "num_logits", "num_kept", "num_new_tokens", "num_kept_blocks", "num_new_blocks", "num_prompt", "new_tokens", "new_blocks", "adapters", "adapter_names", "fork_parents", "fork_children", "fork_num_tokens", "fork_num_blocks", "freed", "copy_sources", "copy_targets", "num_runs", "run_positions", "run_lengths", "run_offsets", "run_media", "run_grids", "run_is_mutual", "run_paces", "media", "states", "num_saves", "save_positions", "save_slots", "state_copy_sources", "state_copy_targets", "vector_keys", "num_spans", "span_offsets", "span_lengths", "num_scales", "scale_vectors", "scales", "num_probes", "probe_vectors", "probe_layers")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGITS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    FORK_PARENTS_FIELD_NUMBER: _ClassVar[int]
    FORK_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    FORK_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORK_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGETS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    RUN_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    RUN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RUN_MEDIA_FIELD_NUMBER: _ClassVar[int]
    RUN_GRIDS_FIELD_NUMBER: _ClassVar[int]
    RUN_IS_MUTUAL_FIELD_NUMBER: _ClassVar[int]
    RUN_PACES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAVES_FIELD_NUMBER: _ClassVar[int]
    SAVE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SAVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    STATE_COPY_TARGETS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    SPAN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SPAN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCALES_FIELD_NUMBER: _ClassVar[int]
    SCALE_VECTORS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBES_FIELD_NUMBER: _ClassVar[int]
    PROBE_VECTORS_FIELD_NUMBER: _ClassVar[int]
    PROBE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    seq_ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    num_scheduled: _containers.RepeatedScalarFieldContainer[int]
    num_logits: _containers.RepeatedScalarFieldContainer[int]
    num_kept: _containers.RepeatedScalarFieldContainer[int]
    num_new_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_kept_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_prompt: _containers.RepeatedScalarFieldContainer[int]
    new_tokens: _containers.RepeatedScalarFieldContainer[int]
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedScalarFieldContainer[int]
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    fork_parents: _containers.RepeatedScalarFieldContainer[int]
    fork_children: _containers.RepeatedScalarFieldContainer[int]
    fork_num_tokens: _containers.RepeatedScalarFieldContainer[int]
    fork_num_blocks: _containers.RepeatedScalarFieldContainer[int]
    freed: _containers.RepeatedScalarFieldContainer[int]
    copy_sources: _containers.RepeatedScalarFieldContainer[int]
    copy_targets: _containers.RepeatedScalarFieldContainer[int]
    num_runs: _containers.RepeatedScalarFieldContainer[int]
    run_positions: _containers.RepeatedScalarFieldContainer[int]
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    run_offsets: _containers.RepeatedScalarFieldContainer[int]
    run_media: _containers.RepeatedScalarFieldContainer[int]
    run_grids: _containers.RepeatedScalarFieldContainer[int]
    run_is_mutual: _containers.RepeatedScalarFieldContainer[bool]
    run_paces: _containers.RepeatedScalarFieldContainer[float]
    media: _containers.RepeatedScalarFieldContainer[bytes]
    states: _containers.RepeatedScalarFieldContainer[int]
    num_saves: _containers.RepeatedScalarFieldContainer[int]
    save_positions: _containers.RepeatedScalarFieldContainer[int]
    save_slots: _containers.RepeatedScalarFieldContainer[int]
    state_copy_sources: _containers.RepeatedScalarFieldContainer[int]
    state_copy_targets: _containers.RepeatedScalarFieldContainer[int]
    vector_keys: _containers.RepeatedScalarFieldContainer[str]
    num_spans: _containers.RepeatedScalarFieldContainer[int]
    span_offsets: _containers.RepeatedScalarFieldContainer[int]
    span_lengths: _containers.RepeatedScalarFieldContainer[int]
    num_scales: _containers.RepeatedScalarFieldContainer[int]
    scale_vectors: _containers.RepeatedScalarFieldContainer[int]
    scales: _containers.RepeatedScalarFieldContainer[float]
    num_probes: _containers.RepeatedScalarFieldContainer[int]
    probe_vectors: _containers.RepeatedScalarFieldContainer[int]
    probe_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., seq_ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., num_scheduled: _Optional[_Iterable[int]] = ..., num_logits: _Optional[_Iterable[int]] = ..., num_kept: _Optional[_Iterable[int]] = ..., num_new_tokens: _Optional[_Iterable[int]] = ..., num_kept_blocks: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., num_prompt: _Optional[_Iterable[int]] = ..., new_tokens: _Optional[_Iterable[int]] = ..., new_blocks: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[int]] = ..., adapter_names: _Optional[_Iterable[str]] = ..., fork_parents: _Optional[_Iterable[int]] = ..., fork_children: _Optional[_Iterable[int]] = ..., fork_num_tokens: _Optional[_Iterable[int]] = ..., fork_num_blocks: _Optional[_Iterable[int]] = ..., freed: _Optional[_Iterable[int]] = ..., copy_sources: _Optional[_Iterable[int]] = ..., copy_targets: _Optional[_Iterable[int]] = ..., num_runs: _Optional[_Iterable[int]] = ..., run_positions: _Optional[_Iterable[int]] = ..., run_lengths: _Optional[_Iterable[int]] = ..., run_offsets: _Optional[_Iterable[int]] = ..., run_media: _Optional[_Iterable[int]] = ..., run_grids: _Optional[_Iterable[int]] = ..., run_is_mutual: _Optional[_Iterable[bool]] = ..., run_paces: _Optional[_Iterable[float]] = ..., media: _Optional[_Iterable[bytes]] = ..., states: _Optional[_Iterable[int]] = ..., num_saves: _Optional[_Iterable[int]] = ..., save_positions: _Optional[_Iterable[int]] = ..., save_slots: _Optional[_Iterable[int]] = ..., state_copy_sources: _Optional[_Iterable[int]] = ..., state_copy_targets: _Optional[_Iterable[int]] = ..., vector_keys: _Optional[_Iterable[str]] = ..., num_spans: _Optional[_Iterable[int]] = ..., span_offsets: _Optional[_Iterable[int]] = ..., span_lengths: _Optional[_Iterable[int]] = ..., num_scales: _Optional[_Iterable[int]] = ..., scale_vectors: _Optional[_Iterable[int]] = ..., scales: _Optional[_Iterable[float]] = ..., num_probes: _Optional[_Iterable[int]] = ..., probe_vectors: _Optional[_Iterable[int]] = ..., probe_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("slot", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_tokens", "bias_values", "logprobs", "processed_logprobs", "watermark", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_breaker_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    XTC_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    XTC_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DYNATEMP_RANGE_FIELD_NUMBER: _ClassVar[int]
    DYNATEMP_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_TAU_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_ETA_FIELD_NUMBER: _ClassVar[int]
    DRY_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    DRY_BASE_FIELD_NUMBER: _ClassVar[int]
    DRY_ALLOWED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRY_PENALTY_LAST_N_FIELD_NUMBER: _ClassVar[int]
    DRY_BREAKER_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    processed_logprobs: bool
    watermark: Watermark
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_breaker_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ..., processed_logprobs: _Optional[bool] = ..., watermark: _Optional[_Union[Watermark, _Mapping]] = ..., top_n_sigma: _Optional[float] = ..., xtc_probability: _Optional[float] = ..., xtc_threshold: _Optional[float] = ..., dynatemp_range: _Optional[float] = ..., dynatemp_exponent: _Optional[float] = ..., mirostat: _Optional[int] = ..., mirostat_tau: _Optional[float] = ..., mirostat_eta: _Optional[float] = ..., dry_multiplier: _Optional[float] = ..., dry_base: _Optional[float] = ..., dry_allowed_length: _Optional[int] = ..., dry_penalty_last_n: _Optional[int] = ..., dry_breaker_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("gamma", "delta")
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    gamma: float
    delta: float
    def __init__(self, gamma: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("step", "samplings", "seq_ids", "logits_indexes", "slots", "keys", "draws", "masks", "mask_rows", "num_bias", "bias_tokens", "bias_values", "mus", "num_ahead", "unnamed", "num_traced", "score_seq_ids", "score_starts", "score_num_tokens", "score_num_top", "score_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLINGS_FIELD_NUMBER: _ClassVar[int]
    SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_INDEXES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    MASK_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BIAS_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MUS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    UNNAMED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRACED_FIELD_NUMBER: _ClassVar[int]
    SCORE_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_STARTS_FIELD_NUMBER: _ClassVar[int]
    SCORE_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORE_NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    samplings: _containers.RepeatedCompositeFieldContainer[Sampling]
    seq_ids: _containers.RepeatedScalarFieldContainer[int]
    logits_indexes: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    draws: _containers.RepeatedScalarFieldContainer[int]
    masks: _containers.RepeatedScalarFieldContainer[int]
    mask_rows: _containers.RepeatedScalarFieldContainer[bytes]
    num_bias: _containers.RepeatedScalarFieldContainer[int]
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    mus: _containers.RepeatedScalarFieldContainer[float]
    num_ahead: _containers.RepeatedScalarFieldContainer[int]
    unnamed: _containers.RepeatedScalarFieldContainer[int]
    num_traced: _containers.RepeatedScalarFieldContainer[int]
    score_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    score_starts: _containers.RepeatedScalarFieldContainer[int]
    score_num_tokens: _containers.RepeatedScalarFieldContainer[int]
    score_num_top: _containers.RepeatedScalarFieldContainer[int]
    score_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., samplings: _Optional[_Iterable[_Union[Sampling, _Mapping]]] = ..., seq_ids: _Optional[_Iterable[int]] = ..., logits_indexes: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[int]] = ..., draws: _Optional[_Iterable[int]] = ..., masks: _Optional[_Iterable[int]] = ..., mask_rows: _Optional[_Iterable[bytes]] = ..., num_bias: _Optional[_Iterable[int]] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., mus: _Optional[_Iterable[float]] = ..., num_ahead: _Optional[_Iterable[int]] = ..., unnamed: _Optional[_Iterable[int]] = ..., num_traced: _Optional[_Iterable[int]] = ..., score_seq_ids: _Optional[_Iterable[int]] = ..., score_starts: _Optional[_Iterable[int]] = ..., score_num_tokens: _Optional[_Iterable[int]] = ..., score_num_top: _Optional[_Iterable[int]] = ..., score_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Embed(_message.Message):
    __slots__ = ("step", "logits_rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOGITS_ROWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    logits_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., logits_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("result", "failure", "vectors")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    result: Result
    failure: Failure
    vectors: Vectors
    def __init__(self, result: _Optional[_Union[Result, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., vectors: _Optional[_Union[Vectors, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("tokens", "logprobs", "ranks", "num_top", "top_tokens", "top_logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    num_top: _containers.RepeatedScalarFieldContainer[int]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., num_top: _Optional[_Iterable[int]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("step", "tokens", "logprob_rows", "logprobs", "num_scores", "scores", "mus", "traced_rows", "before", "changed_rows", "after", "num_allowed", "taken", "num_probes", "probes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORES_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    MUS_FIELD_NUMBER: _ClassVar[int]
    TRACED_ROWS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_ROWS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBES_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprob_rows: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    num_scores: _containers.RepeatedScalarFieldContainer[int]
    scores: Logprobs
    mus: _containers.RepeatedScalarFieldContainer[float]
    traced_rows: _containers.RepeatedScalarFieldContainer[int]
    before: Logprobs
    changed_rows: _containers.RepeatedScalarFieldContainer[int]
    after: Logprobs
    num_allowed: _containers.RepeatedScalarFieldContainer[int]
    taken: _containers.RepeatedScalarFieldContainer[float]
    num_probes: _containers.RepeatedScalarFieldContainer[int]
    probes: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprob_rows: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., num_scores: _Optional[_Iterable[int]] = ..., scores: _Optional[_Union[Logprobs, _Mapping]] = ..., mus: _Optional[_Iterable[float]] = ..., traced_rows: _Optional[_Iterable[int]] = ..., before: _Optional[_Union[Logprobs, _Mapping]] = ..., changed_rows: _Optional[_Iterable[int]] = ..., after: _Optional[_Union[Logprobs, _Mapping]] = ..., num_allowed: _Optional[_Iterable[int]] = ..., taken: _Optional[_Iterable[float]] = ..., num_probes: _Optional[_Iterable[int]] = ..., probes: _Optional[_Iterable[float]] = ...) -> None: ...

class Vectors(_message.Message):
    __slots__ = ("step", "size", "values")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    size: int
    values: bytes
    def __init__(self, step: _Optional[int] = ..., size: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("step", "code", "message", "param")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    step: int
    code: str
    message: str
    param: str
    def __init__(self, step: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...
