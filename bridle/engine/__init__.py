"""The engine in plain Python: scheduling, KV blocks, controllers and stop conditions.

The engine computes no tensors itself. A backend implements `Executor`, a runner of controllers implements
`ControllerPool`, and a tokenizer implements `TextDecoder`. Each part of the engine can be used alone.
"""

from bridle.engine.async_engine import AsyncEngine as AsyncEngine
from bridle.engine.client import EngineClient as EngineClient
from bridle.engine.client import EventStream as EventStream
from bridle.engine.control.decision import Branch as Branch
from bridle.engine.control.decision import Decision as Decision
from bridle.engine.control.decision import Splice as Splice
from bridle.engine.control.decision import mask_allows as mask_allows
from bridle.engine.control.decision import mask_of as mask_of
from bridle.engine.control.decision import mask_words as mask_words
from bridle.engine.engine import Engine as Engine
from bridle.engine.interfaces import Answer as Answer
from bridle.engine.interfaces import Ask as Ask
from bridle.engine.interfaces import ControllerPool as ControllerPool
from bridle.engine.interfaces import Executor as Executor
from bridle.engine.interfaces import ExecutorInfo as ExecutorInfo
from bridle.engine.interfaces import HistoryLookup as HistoryLookup
from bridle.engine.interfaces import Sampler as Sampler
from bridle.engine.interfaces import StoredValue as StoredValue
from bridle.engine.interfaces import TextDecoder as TextDecoder
from bridle.engine.interfaces import TextState as TextState
from bridle.engine.kv.block_manager import BlockManager as BlockManager
from bridle.engine.request import MaxLength as MaxLength
from bridle.engine.request import MaxNewTokens as MaxNewTokens
from bridle.engine.request import Request as Request
from bridle.engine.request import StopOnRepetition as StopOnRepetition
from bridle.engine.request import StopOnTokens as StopOnTokens
from bridle.engine.request import StoppingCriteria as StoppingCriteria
from bridle.engine.scheduling.scheduler import Scheduler as Scheduler
from bridle.engine.scheduling.step_plan import BlockCopy as BlockCopy
from bridle.engine.scheduling.step_plan import ForkRow as ForkRow
from bridle.engine.scheduling.step_plan import PlanRow as PlanRow
from bridle.engine.scheduling.step_plan import SampleBatch as SampleBatch
from bridle.engine.scheduling.step_plan import SampleRow as SampleRow
from bridle.engine.scheduling.step_plan import ScoreRun as ScoreRun
from bridle.engine.scheduling.step_plan import StepPlan as StepPlan
from bridle.engine.scheduling.step_plan import StepResult as StepResult
from bridle.engine.sequence import Sequence as Sequence
from bridle.engine.sequence import copy_seed as copy_seed
from bridle.engine.sequence import fork_key as fork_key
from bridle.engine.sequence import root_key as root_key
from bridle.engine.sequence_state import SequenceStatus as SequenceStatus
from bridle.engine.statistics import EngineStatistics as EngineStatistics
