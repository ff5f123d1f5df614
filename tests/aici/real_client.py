"""Runs a real LLM-side client: `AiciRunner` of the original AICI's Python package drives bridle's runtime. It is a
separate program because that class registers exit handlers for its process. Arguments: the folder that holds the
package, an executable runtime, tokenizer, store, a .wasm file, a prefix for names in shared memory. The last line of
output is a JSON object, after the output of the class. The program uses the class as the specification describes it, in
all versions."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from typing import Any

PROMPT = [1, 2, 3]
#: Runtimes take these from clients that know no such option of their own.
_ALL = ["--cap-fork", "--cap-backtrack", "--cap-ff-tokens"]
_PATIENT = ["--wasm-max-step-time", "5000", "--wasm-max-init-time", "5000"]


def make_runner(kind: Any, runtime: str, tokenizer: str, store: str, prefix: str) -> Any:
    """Return the client, with the options of its version."""
    known = inspect.signature(kind.__init__).parameters
    args = ["--store", store, *_PATIENT]
    options: dict[str, Any] = {"json_size": 8, "bin_size": 8, "pref": prefix}
    if hasattr(kind, "exec_post_pre"):
        args += ["--wasm-max-pre-step-time", "5000"]
        args += ["--dialect", "1b" if hasattr(kind, "_save_instantiate_result") else "1"]
    else:
        names = ("fork_supported", "backtrack_supported", "ff_tokens_supported")
        options |= {name: True for name in names if name in known}
        args += [flag for name, flag in zip(names, _ALL, strict=True) if name not in known]
    return kind(rtpath=runtime, tokenizer=tokenizer, rtargs=args, **options)


async def prepare(runner: Any, wasm: bytes) -> tuple[str, list[int], Any]:
    """Upload, tag, list and instantiate a module. Returns the module, the prompt to use, and the tags."""
    module = (await runner.upload_module_async(wasm))["module_id"]
    tags: Any = None
    if hasattr(runner, "set_tags"):
        await runner.set_tags(module, "genuine", {"user": "root", "is_admin": True})
        tags = await runner.get_tags()
    given = await runner.instantiate_async("run-1", PROMPT, module, "the argument")
    if isinstance(given, dict) and "forks" in given:
        raise SystemExit(f"not started: {given}")
    prompt = PROMPT + given if isinstance(given, list) and hasattr(runner, "exec_post_pre") else PROMPT
    return module, prompt, tags


def best(row: Any) -> int:
    """Return the token of the scripted model, which is the first token with the highest bias."""
    return int(row.argmax())


def steps1(runner: Any, tokens: list[int]) -> None:
    """Run the post and pre callbacks, then the mid callback, until the controller stops."""
    for _ in range(50):
        runner.exec_post_pre()
        _suspend, num_forks, forced = runner.pre_status(1)
        tokens += forced
        if num_forks == 0 or 1 in runner.get_seqs_to_stop():
            return
        runner.add_mid(1)
        runner.exec_mid()
        bias = runner.recv_logit_bias()
        rows = bias[1] if isinstance(bias, tuple) else bias
        appended, backtrack = runner.mid_status(1)
        if appended or backtrack:
            del tokens[len(tokens) - max(backtrack - 1, 0) :]
        else:
            appended = [best(rows[0])]
        tokens += appended
        runner.tokens_generated(1, list(appended), backtrack)
    raise SystemExit("it did not stop")


def steps2(runner: Any, tokens: list[int]) -> None:
    """Run only mid callbacks, whose answers have branches, until the controller stops."""
    for _ in range(50):
        runner.add_mid(1)
        runner.exec_mid()
        receive = getattr(runner, "recv_logit_bias_numpy", None) or runner.recv_logit_bias
        _, rows = receive()
        status = runner.mid_status(1)
        if status.error or not status.branches:
            return
        branch = status.branches[0]
        if branch.mask is None:
            splice = branch.splices[0]
            del tokens[len(tokens) - splice.backtrack :]
            tokens += splice.ff_tokens
            runner.tokens_generated(1, list(splice.ff_tokens), splice.backtrack)
        else:
            tokens.append(best(rows[branch.mask]))
            runner.tokens_generated(1, tokens[-1:])
    raise SystemExit("it did not stop")


def main() -> None:
    folder, runtime, tokenizer, store, wasm, prefix = sys.argv[1:]
    sys.path.insert(0, folder)
    from pyaici.comms import AiciRunner  # type: ignore[import-not-found]

    runner = make_runner(AiciRunner, runtime, tokenizer, store, prefix)
    with open(wasm, "rb") as file:
        module, tokens, tags = asyncio.run(prepare(runner, file.read()))
    runner.assign_seq_id("run-1", 1)
    (steps1 if hasattr(runner, "exec_post_pre") else steps2)(runner, tokens)
    logs = runner.seq_logs(1)
    runner.seq_freed(1)
    runner.stop()
    said = {"module": module, "tokens": tokens, "tags": tags, "logs": logs, "vocab_size": runner.vocab_size}
    print(json.dumps(said | {"status": runner.proc.returncode}), flush=True)


if __name__ == "__main__":
    main()
