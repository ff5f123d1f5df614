"""Tests that a real model in a shard process gives exactly the output of a model in this process."""

from __future__ import annotations

from bridle.config import ModelConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Decision, Engine, Request
from bridle.engine.interfaces import Executor
from bridle.launch.launcher import launch_shard
from bridle.model.loading import load_executor
from bridle.outputs import Event
from bridle.sampling import SamplingParams
from bridle.sampling_values import Watermark
from tests.engine.support import replay
from tests.fakes import tiny_checkpoints


class Masked(Controller):
    """A controller that allows a third of the tokens, a different third at each step."""

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(view.mask_of(range(len(view.tokens) % 3, view.vocab_size, 3)))


def requests() -> list[Request]:
    samplings = [
        SamplingParams(max_tokens=20, temperature=0.0),
        SamplingParams(max_tokens=20, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=2),
        SamplingParams(max_tokens=20, seed=4, n=3, top_k=40, prompt_logprobs=1),
        SamplingParams(max_tokens=20, seed=5, logit_bias={7: 3.0}, logprobs=0, logprobs_mode="processed"),
        SamplingParams(max_tokens=20, seed=7, watermark=Watermark(delta=8.0)),
    ]
    plain = [Request(f"r{i}", tuple(range(5, 40 + i)), params) for i, params in enumerate(samplings)]
    steered = Request("steered", (9, 8, 7), SamplingParams(max_tokens=20, seed=6, logprobs=1), controller=Masked())
    embedded = Request("embedded", tuple(range(5, 30)), SamplingParams(max_tokens=1), embeds=True)
    return [*plain, steered, embedded]


def run(executor: Executor) -> list[object]:
    engine = Engine(executor, pools=[PythonControllerPool(executor.info.vocab_size)])
    for request in requests():
        engine.add(request)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    engine.close()
    return [
        [(one.path, one.tokens, one.logprobs, one.vector, one.reason) for one in each.outputs.values()]
        + [each.prompt and each.prompt.logprobs]
        for _, each in sorted(replay(events).items())
    ]


def test_a_shard_says_what_the_model_says_here() -> None:
    config = ModelConfig(str(tiny_checkpoints.cached_checkpoint("llama")), num_blocks=64, block_size=16, num_threads=1)
    here = load_executor(config)
    there = launch_shard(config, stands_by=False)
    assert there.info == here.info
    assert there.num_bytes == here.num_bytes
    assert run(there) == run(here)
