"""Checks of the application on a real Ray, which `test_ray_cluster` runs in an environment with Ray. The script prints
a line for each check that holds.

The first argument is a folder for Ray's files; all others name the checks to run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from bridle.launch.ray import build_app
from tests.aici.guests import END, guest2, sample

URL = "http://127.0.0.1:{}"
PATIENCE = 600.0
ENGINE = "ray::ServeReplica:bridle:engines"  # what Ray calls their processes
MAX_TOKENS = 400
SETTINGS: dict[str, Any] = {"min_engines": 2, "max_engines": 2, "num_cpus": 1, "drain": 20}


#: A controller that draws one token and ends.
SHORT = guest2([sample([66], 3072), END])


#: What scripts may call, in the front: it waits for as long as a file is there, and says how often it was called.
TOOLS = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def lookup(city: str) -> str:
    "Tells of a city."
    with (HERE / "calls").open("a") as calls:
        calls.write(city + "\\n")
    while (HERE / "closed").exists():
        time.sleep(0.05)
    return f"{city} is fair"
"""
POLICIES = """
[[policy]]
name = "words"
kind = "phrases"
phrases = ["forbidden"]
action = "replace"
replacement = "***"
"""


def operator_files() -> dict[str, str]:
    """Write the operator's files of tools and policies; return their paths by setting."""
    folder = Path(sys.argv[1], "operator")
    folder.mkdir(exist_ok=True)
    (folder / "town.py").write_text(TOOLS)
    (folder / "tools.toml").write_text('[tools.lookup]\npython = "town.py:lookup"\n')
    (folder / "policies.toml").write_text(POLICIES)
    return {name: str(folder / f"{name}.toml") for name in ("tools", "policies")}


def settings() -> dict[str, Any]:
    return SETTINGS | {"control_store": str(Path(sys.argv[1], "controllers"))} | operator_files()


class Reader(threading.Thread):
    """Reads one stream to its end in a thread."""

    def __init__(self, url: str, number: int, **more: Any) -> None:
        super().__init__(daemon=True)
        self.items: list[Any] = []
        self.status = 0
        self.problem = ""
        self._url = url
        options = {"include_resuming": True, "include_usage": True}
        self._body = {"prompt": f"{number} Once upon a time", "max_tokens": MAX_TOKENS, "seed": number, "stream": True}
        self._body |= {"temperature": 0, "ignore_eos": True, "stream_options": options} | more
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url + "/v1/completions", json=self._body, timeout=PATIENCE) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.items.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.problem = repr(error)

    @property
    def text(self) -> str:
        return "".join(choice.get("text", "") for item in self.items for choice in item.get("choices", ()))

    @property
    def num_tokens(self) -> int:
        return int(self.items[-1]["usage"]["completion_tokens"]) if self.items and self.items[-1].get("usage") else 0

    @property
    def is_resumed(self) -> bool:
        return any(choice.get("resuming") for item in self.items for choice in item.get("choices", ()))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} does not happen"
        time.sleep(0.1)


def engines() -> list[int]:
    """Return the process ids of the engines."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if ENGINE in " ".join(p.info["cmdline"] or ())]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def run(url: str, numbers: range, **more: Any) -> list[Reader]:
    readers = [Reader(url, number, **more) for number in numbers]
    for reader in readers:
        reader.join(PATIENCE)
        assert reader.status == 200 and not reader.problem, (reader.status, reader.problem, reader.items[-1:])
    return readers


def check_requests_spread(url: str) -> None:
    pids = engines()
    assert len(pids) == 2
    before = {pid: psutil.Process(pid).cpu_times().user for pid in pids}
    readers = run(url, range(8))
    assert all(reader.num_tokens == MAX_TOKENS for reader in readers)
    busy = [psutil.Process(pid).cpu_times().user - before[pid] for pid in pids]
    assert min(busy) > 0.25 * max(busy), busy


def check_a_beginning_stays_where_it_is(url: str) -> None:
    prompt = "A long system prompt that everybody shares. " * 12
    run(url, range(1), prompt=prompt, max_tokens=4)
    time.sleep(2)  # until the engines have said again what they have to do
    cached = metric(url, "bridle_engine_cached_tokens_total")
    for number in range(6):
        run(url, range(number, number + 1), prompt=f"{prompt} {number}", max_tokens=4)
    wait_for(lambda: metric(url, "bridle_engine_cached_tokens_total") > cached + 5 * 100, "sharing")


def check_constraints_and_several_choices(url: str) -> None:
    body = {"prompt": "Is it?", "max_tokens": 9, "regex": "(yes|no)", "n": 2, "seed": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
    assert [choice["text"] in ("yes", "no") for choice in answer["choices"]] == [True, True], answer


def check_what_cannot_be_is_refused(url: str) -> None:
    steered = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "controller": "a" * 64}, timeout=60)
    assert steered.status_code in (400, 501), steered.text
    assert httpx.post(f"{url}/v1/completions", json={"prompt": [-1]}, timeout=60).status_code == 400


def check_wasm_controllers_run_on_every_engine(url: str) -> None:
    """Both engines run a script and a Wasm module that was uploaded once, by the module's hash and by its tag."""
    made = httpx.post(f"{url}/v1/controllers", content=SHORT, timeout=PATIENCE)
    assert made.status_code == 200, made.text
    module = made.json()["module_id"]
    named = {"module_id": module, "tags": ["short"]}
    assert httpx.post(f"{url}/v1/controllers/tags", json=named, timeout=PATIENCE).status_code == 200
    before = {pid: psutil.Process(pid).cpu_times().user for pid in engines()}
    for number in range(6):
        for name in (module, "short"):
            body = {"prompt": f"{number} {name[:5]}", "controller": name, "max_tokens": 20}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 1, answer.text
    assert len(before) == 2
    (choice,) = scripted(url, "await $`scripted`; await gen({ maxTokens: 3 })")["choices"]
    assert "scripted" in choice["text"], choice


def scripted(url: str, script: str, **more: Any) -> dict[str, Any]:
    """Return a script's answer; repeat the request while the interpreter is being compiled."""
    body = {"prompt": "Say", "controller": "jsctrl", "controller_arg": script, "max_tokens": 60} | more
    answers: list[httpx.Response] = []

    def is_compiled() -> bool:
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE))
        return answers[-1].status_code != 429

    wait_for(is_compiled, "compiling the interpreter")
    assert answers[-1].status_code == 200, answers[-1].text
    return dict(answers[-1].json())


#: A script that writes what the tool says of two cities.
TOWN = """
for (const city of ['Oslo', 'Rome']) { const said = await tool('lookup', { city }).text(); await $`${said}. ` }
"""


def check_scripts_call_tools_of_the_front(url: str) -> None:
    (choice,) = scripted(url, TOWN)["choices"]
    assert choice["text"] == "Oslo is fair. Rome is fair. ", choice
    assert metric(url, 'bridle_tool_calls_total{tool="lookup"') == 2


def check_no_call_is_made_twice_when_its_engine_is_lost(url: str) -> None:
    """Engines are killed while a script waits for a tool; a new engine runs the script again with the same answers."""
    folder = Path(sys.argv[1], "operator")
    (folder / "closed").touch()
    (folder / "calls").write_text("")
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(scripted(url, TOWN)), daemon=True)
    asking.start()
    wait_for(lambda: (folder / "calls").read_text() == "Oslo\n", "the call")
    before = set(engines())
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(set(engines()) - before) == 2, "new engines")
    (folder / "closed").unlink()
    asking.join(PATIENCE)
    assert answers and answers[0]["choices"][0]["text"] == "Oslo is fair. Rome is fair. "
    assert (folder / "calls").read_text() == "Oslo\nRome\n"


def check_clients_answer_calls(url: str) -> None:
    answers: list[dict[str, Any]] = []
    script = "await $`${await tool('ask', { what: 'Name?' }).text()}`"
    asking = threading.Thread(target=lambda: answers.append(scripted(url, script, client_tools=["ask"])), daemon=True)
    asking.start()

    def waiting() -> list[Any]:
        return list(httpx.get(f"{url}/v1/tool_results", timeout=60).json()["data"])

    wait_for(lambda: bool(waiting()), "the question")
    (asked,) = waiting()
    told = httpx.post(f"{url}/v1/tool_results/{asked['id']}", json={"result": "Ada"}, timeout=60)
    assert told.status_code == 204, told.text
    asking.join(PATIENCE)
    assert answers and answers[0]["choices"][0]["text"] == "Ada", answers


def check_policies_hold(url: str) -> None:
    (choice,) = scripted(url, "await $`That is forbidden here`")["choices"]
    assert "***" in choice["text"] and "forbidden" not in choice["text"], choice
    (row,) = httpx.get(f"{url}/v1/policies", timeout=60).json()["policies"]
    assert row["name"] == "words"


def check_nothing_is_lost_with_an_engine(url: str) -> None:
    """One of two engines is killed under 12 streams, and every stream continues with the same text."""
    expected = [reader.text for reader in run(url, range(12))]
    readers = [Reader(url, number) for number in range(12)]
    wait_for(lambda: all(len(reader.items) > 5 for reader in readers), "streaming")
    began = time.perf_counter()
    os.kill(engines()[0], signal.SIGKILL)
    wait_for(lambda: any(reader.is_resumed for reader in readers), "hearing of the loss")
    print(f"told after {time.perf_counter() - began:.1f} s")
    for reader in readers:
        reader.join(PATIENCE)
        assert reader.num_tokens == MAX_TOKENS, (reader.problem, reader.items[-1:])
    assert [reader.text for reader in readers] == expected
    assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
    wait_for(lambda: metric(url, "bridle_engine_blocks") > 0 and len(engines()) == 2, "a new engine")


def check_a_rolling_update_breaks_no_stream(url: str) -> None:
    before = set(engines())
    readers = [Reader(url, number) for number in range(4)]
    wait_for(lambda: all(len(reader.items) > 5 for reader in readers), "streaming")
    serve.run(build_app(settings() | {"engine_options": {"max_num_seqs": 64}}), name="bridle", route_prefix="/")
    for reader in readers:
        reader.join(PATIENCE)
        assert reader.num_tokens == MAX_TOKENS, (reader.problem, reader.items[-1:])
    wait_for(lambda: not before & set(engines()) and len(engines()) == 2, "the update")


def check_the_log_tells_of_no_probe(url: str) -> None:
    """The log has no health probes and no calls between fronts and engines. A front logs a client's request once."""
    httpx.get(f"{url}/health/ready", timeout=60)
    wait_for(lambda: bool(logged()), "logging")
    told = "".join(logged())
    assert "check_health" not in told and '"look"' not in told and "CALL look" not in told, told[-2000:]
    assert "CALL generate" not in told


def logged() -> list[str]:
    """Return the text of each replica's log."""
    folder = Path(sys.argv[1], "session_latest", "logs", "serve")
    return [path.read_text(errors="replace") for path in folder.glob("replica_*")]


def check_a_configuration_with_several_applications(url: str) -> None:
    """Deploy a file with two applications twice, as `serve deploy` does; the second file has changed."""
    serve.delete("bridle")
    for words in ("", "changed"):
        deploy_file(words)
        for name in ("one", "two"):
            root = f"{url}/{name}"
            ready = f"{root}/health/ready"
            wait_for(lambda where=ready: httpx.get(where, timeout=60).status_code == 200, ready)  # type: ignore[misc]
            assert [row["id"] for row in httpx.get(f"{root}/v1/models", timeout=60).json()["data"]] == [name + words]
            body = {"prompt": "Is it?", "max_tokens": 9, "regex": "(yes|no)", "seed": 3}
            (choice,) = httpx.post(f"{root}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
            assert choice["text"] in ("yes", "no")


def deploy_file(words: str) -> None:
    """Run `serve deploy` with two applications whose models have these `words` in their names."""
    args = {"num_cpus": 1, "drain": 5, "min_engines": 1, "max_engines": 1}
    applications = [
        {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": "bridle.launch.ray:build_app",
            "args": args | {"name": name + words},
        }
        for name in ("one", "two")
    ]
    file = Path(sys.argv[1], "deployed.yaml")
    config = {"logging_config": {"enable_access_log": False}, "applications": applications}
    file.write_text(json.dumps(config))  # which is YAML, too
    command = [str(Path(sys.executable).with_name("serve")), "deploy", str(file), "-a", DASHBOARD[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    def is_there() -> bool:
        found = serve.status().applications
        return all(found[name].status == "RUNNING" for name in ("one", "two") if name in found) and len(found) >= 2

    wait_for(is_there, "the deployment")


#: The address of Ray's dashboard, which takes deployments.
DASHBOARD: list[str] = []

CHECKS = (
    check_requests_spread,
    check_a_beginning_stays_where_it_is,
    check_constraints_and_several_choices,
    check_what_cannot_be_is_refused,
    check_wasm_controllers_run_on_every_engine,
    check_scripts_call_tools_of_the_front,
    check_no_call_is_made_twice_when_its_engine_is_lost,
    check_clients_answer_calls,
    check_policies_hold,
    check_nothing_is_lost_with_an_engine,
    check_a_rolling_update_breaks_no_stream,
    check_the_log_tells_of_no_probe,
    check_a_configuration_with_several_applications,
)


def main() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, dashboard = free.getsockname()[1], other.getsockname()[1]
    DASHBOARD.append(URL.format(dashboard))
    os.environ["RAY_DASHBOARD_ADDRESS"] = DASHBOARD[0]
    ray.init(num_cpus=8, include_dashboard=True, dashboard_port=dashboard, log_to_driver=False, _temp_dir=sys.argv[1])
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(settings()), name="bridle", route_prefix="/")
        url = URL.format(port)
        wait_for(lambda: httpx.get(f"{url}/health/ready", timeout=60).status_code == 200, "readiness")
        wait_for(lambda: len(engines()) == 2, "the second engine")
        for check in [each for each in CHECKS if each.__name__ in sys.argv[2:] or len(sys.argv) == 2]:
            check(url)
            print(check.__name__, "ok", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
