"""The engine: scheduling, KV blocks, control and stopping, in plain Python.

The engine computes no tensors itself. A backend implements `Executor`, a runner of controllers implements
`ControllerPool`, and a tokenizer implements `TextDecoder`. Each part can be used alone.
"""

from bridle.engine.async_engine import AsyncEngine
from bridle.engine.client import EngineClient, EventStream
from bridle.engine.control.decision import Branch, Decision, Splice, mask_allows, mask_of, mask_words
from bridle.engine.engine import Engine
from bridle.engine.interfaces import (
    Answer,
    Ask,
    ControllerPool,
    Executor,
    ExecutorInfo,
    HistoryLookup,
    Sampler,
    StoredValue,
    TextDecoder,
    TextState,
)
from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.request import (
    MaxLength,
    MaxNewTokens,
    Request,
    StopOnRepetition,
    StopOnTokens,
    StoppingCriteria,
)
from bridle.engine.scheduling.scheduler import Scheduler
from bridle.engine.scheduling.step_plan import (
    BlockCopy,
    ForkRow,
    PlanRow,
    SampleBatch,
    SampleRow,
    ScoreRun,
    StepPlan,
    StepResult,
)
from bridle.engine.sequence import Sequence, copy_seed, fork_key, root_key
from bridle.engine.sequence_state import SequenceStatus
from bridle.engine.statistics import EngineStatistics

__all__ = [
    "Answer",
    "Ask",
    "AsyncEngine",
    "BlockCopy",
    "BlockManager",
    "Branch",
    "ControllerPool",
    "Decision",
    "Engine",
    "EngineClient",
    "EngineStatistics",
    "EventStream",
    "Executor",
    "ExecutorInfo",
    "ForkRow",
    "HistoryLookup",
    "MaxLength",
    "MaxNewTokens",
    "PlanRow",
    "Request",
    "SampleBatch",
    "SampleRow",
    "Sampler",
    "Scheduler",
    "ScoreRun",
    "Sequence",
    "SequenceStatus",
    "Splice",
    "StepPlan",
    "StepResult",
    "StopOnRepetition",
    "StopOnTokens",
    "StoppingCriteria",
    "StoredValue",
    "TextDecoder",
    "TextState",
    "copy_seed",
    "fork_key",
    "mask_allows",
    "mask_of",
    "mask_words",
    "root_key",
]
