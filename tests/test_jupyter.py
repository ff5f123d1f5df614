"""Tests of `LLM` in a Jupyter kernel: interrupts, progress bars, `await`, streams that show themselves, forks."""

from __future__ import annotations

import os
import queue
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.sources import ROOT
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

#: `Waits` draws a token, says so in a file, and then its output goes on until somebody ends it.
SETUP = """
import os, pathlib
from bridle import LLM, Controller, Decision, EngineClosed, SamplingParams

class Waits(Controller):
    def __init__(self, marker):
        self.marker = pathlib.Path(marker)
    def next(self, view):
        if not view.generated:
            return Decision.sample()
        self.marker.touch()
        return Decision.wait()

llm = LLM({folder!r}, sampling=SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), kv_memory=8 << 20)
"""


class Kernel:
    """A Jupyter kernel that runs cells."""

    def __init__(self) -> None:
        manager = pytest.importorskip("jupyter_client", reason="needs the extra notebook").KernelManager()
        pytest.importorskip("ipykernel", reason="needs the extra notebook")
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        manager.start_kernel(env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def begin(self, code: str) -> str:
        """Run a cell, and return the id that its messages answer."""
        return str(self.client.execute(textwrap.dedent(code)))

    def end(self, cell: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Wait for a cell, and return its answer and everything that it showed."""
        shown: list[dict[str, Any]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != cell:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            shown.append({"type": message["msg_type"], **message["content"]})
        while True:
            answer = self.client.get_shell_msg(timeout=PATIENCE)
            if answer["parent_header"].get("msg_id") == cell:
                return answer["content"], shown

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a cell that has to succeed, and return everything that it showed."""
        answer, shown = self.end(self.begin(code))
        assert answer["status"] == "ok", "\n".join(answer.get("traceback", []))
        return shown

    def says(self, code: str) -> str:
        """Return the output of a cell."""
        return "".join(each["text"] for each in self.run(code) if each["type"] == "stream")

    def interrupt(self) -> None:
        """Interrupt the kernel like the stop button. The request after it wakes a sleeping event loop, which then sees
        the cancellation of a cell with `await`."""
        self.manager.interrupt_kernel()
        self.client.kernel_info()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    made = Kernel()
    try:
        made.run(SETUP.format(folder=str(folder)))
        yield made
    except queue.Empty:
        pytest.fail(f"the kernel said nothing for {PATIENCE} seconds")
    finally:
        made.close()


def pages(shown: list[dict[str, Any]], kind: str) -> list[str]:
    return [each["data"].get("text/html", "") for each in shown if each["type"] == kind]


@pytest.mark.parametrize(
    "call",
    [
        "llm.generate(['a', 'b'], controller=Waits({marker!r}))",
        "await llm.generate_async('a', controller=Waits({marker!r}))",
        "llm.session(controller=Waits({marker!r}), chat_template='hello').send('a')",
    ],
)
def test_an_interrupt_ends_a_cell(kernel: Kernel, tmp_path: Path, call: str) -> None:
    marker = tmp_path / "begun"
    before = int(kernel.says("print(llm.statistics().finished['cancelled'])"))
    cell = kernel.begin(call.format(marker=str(marker)))
    until(marker.exists)
    kernel.interrupt()
    answer, _ = kernel.end(cell)
    assert answer["status"] == "error" and answer["ename"] in ("KeyboardInterrupt", "CancelledError")
    kernel.run(f"import time\nwhile llm.statistics().finished['cancelled'] <= {before}: time.sleep(0.01)")
    assert kernel.says("print(len(llm.generate('a')[0].outputs[0].token_ids))").strip().endswith("6")


def test_an_interrupt_between_a_stream_and_its_reading_leaves_it_readable(kernel: Kernel, tmp_path: Path) -> None:
    marker = tmp_path / "begun"
    cell = kernel.begin(f"stream = llm.stream('a')\npathlib.Path({str(marker)!r}).touch()\nwhile True: pass")
    until(marker.exists)
    kernel.interrupt()
    answer, _ = kernel.end(cell)
    assert answer["ename"] == "KeyboardInterrupt"
    kernel.run("assert stream.read() == llm.generate('a')[0].text")


def test_a_batch_has_a_bar(kernel: Kernel) -> None:
    shown = kernel.run("outputs = llm.generate(['a', 'b', 'c'])")
    (first,) = pages(shown, "display_data")
    assert first.startswith("<progress") and "0/3" in first
    assert pages(shown, "update_display_data")[-1] == ""


def test_a_running_loop_takes_both_kinds_of_calls(kernel: Kernel) -> None:
    kernel.run("""
        import asyncio
        both = await asyncio.gather(llm.generate_async("a"), llm.generate_async("b"))
        assert [output.text for (output,) in both] == [output.text for output in llm.generate(["a", "b"])]
        pieces = [piece async for piece in llm.stream("a")]
        assert "".join(pieces) == both[0][0].text == "".join(llm.stream("a"))
        """)


def test_a_stream_at_the_end_of_a_cell_shows_itself(kernel: Kernel) -> None:
    shown = kernel.run("stream = llm.stream('a', trace=True)\nstream")
    assert len(pages(shown, "display_data")) == 1
    assert "<span style=" in pages(shown, "update_display_data")[-1]
    assert not pages(shown, "execute_result")
    (page,) = pages(kernel.run("llm.generate('a', trace=True)[0]"), "execute_result")
    assert 'title="' in page
    (page,) = pages(kernel.run("llm.session('<b>')"), "execute_result")
    assert "&lt;b&gt;" in page


def test_a_forked_child_gets_an_error(kernel: Kernel) -> None:
    said = kernel.says("""
        child = os.fork()
        if not child:
            status = 1
            try:
                llm.generate("a", use_tqdm=False)
            except EngineClosed:
                status = 7
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """)
    assert said.strip().splitlines()[-1] == "7"
