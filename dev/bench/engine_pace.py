"""Compares the time of an engine step with and without a front end in the same process.

In both cases a fake device takes a fixed time and computes nothing. The difference has two causes. The engine's thread
waits for the interpreter's lock and for processors that others use, and it passes events to the front end.
"""

from __future__ import annotations

import http.client
import json
from typing import NamedTuple


class Pace(NamedTuple):
    """The number of steps so far, and their total seconds."""

    num_steps: int
    seconds: float

    def per_step(self, before: Pace) -> float:
        """Return the mean seconds of a step since `before`."""
        return (self.seconds - before.seconds) / max(self.num_steps - before.num_steps, 1)


def pace_of_server(port: int) -> Pace:
    """Read the step counters of a server with one engine."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/status")
    engine = json.loads(connection.getresponse().read())["models"][0]["engine"]
    connection.close()
    return Pace(engine["num_steps"], engine["step_seconds"])


def step_seconds_alone(device_seconds: float, batch: int, num_tokens: int) -> float:
    """Return the mean seconds of an engine step in this process, while its other threads are idle. Nothing reads the
    engine's events."""
    from bridle.engine.request import Request
    from bridle.sampling import SamplingParams
    from dev.bench.instant_server import instant_engine

    client, tokenizer = instant_engine(device_seconds)
    prompt = tuple(tokenizer.encode("Hello"))
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    paces = []
    try:
        for count in (16, num_tokens):
            streams = [client.submit(Request(str(i), prompt, sampling.with_(max_tokens=count))) for i in range(batch)]
            for stream in streams:
                for _ in stream:
                    pass
            statistics = client.statistics()
            paces.append(Pace(statistics.num_steps, statistics.step_seconds))
    finally:
        client.close()
    return paces[1].per_step(paces[0])
