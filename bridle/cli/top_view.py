"""Renders the page of `bridle top` from a server's state.

Speeds are differences between two states; with only one state, they are averages since the server started. All text
from the server is shown as plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bridle.cli.terminal import harmless

Status = Mapping[str, Any]

_BAR_WIDTH = 24
_MAX_ROWS = 40
_MAX_USERS = 8
_STATES = {"running": "green", "prompt": "cyan", "waiting": "yellow", "coming in": "dim"}


def frame(now: Status, before: Status | None, where: str) -> RenderableType:
    """Return a page that shows the state `now`, with speeds since the state `before`."""
    parts: list[RenderableType] = [_headline(now, where)]
    earlier = {model["name"]: model for model in (before or {}).get("models", ())}
    seconds = now["time"] - before["time"] if before is not None else now["uptime"]
    parts += [_model(model, earlier.get(model["name"]), max(seconds, 1e-3)) for model in now["models"]]
    parts.append(_requests(now))
    return Group(*parts)


def trouble(last: Status, message: str, where: str) -> RenderableType:
    """Return a page about a server that does not answer."""
    return Group(_headline(last, where), Panel(_plain(message), title="no answer", border_style="red"))


def _headline(now: Status, where: str) -> Text:
    flight = now["in_flight"]
    line = Text("bridle ", style="bold")
    line.append(f"{_plain(now['version'])} at {_plain(where)}  up {_duration(now['uptime'])}  ")
    line.append(f"{flight['requests']}/{flight['max_requests']} requests in flight, {flight['refused']} refused")
    if writers := now.get("front_ends"):  # the server counts as a front end
        num_up = 1 + sum(each["is_up"] for each in writers)
        style = "" if num_up > len(writers) else "bold red"
        line.append(f"  {num_up}/{1 + len(writers)} front ends", style=style)
    if now["is_draining"]:
        line.append("  shutting down", style="bold yellow")
    return line


def _model(model: Status, earlier: Status | None, seconds: float) -> RenderableType:
    title = Text.assemble((_plain(model["name"]).plain, "bold"), f" {_plain(model['state'])}")
    engine = model.get("engine")
    if engine is None:
        return Panel(Text("not loaded", style="dim"), title=title, title_align="left")
    old = (earlier or {}).get("engine") or {}
    grid = Table.grid(padding=(0, 2))
    grid.add_row("batch", _bar(engine.get("num_running", 0), model["max_num_seqs"]), _batch(engine))
    blocks = engine.get("num_blocks", 0)
    used = blocks - engine.get("num_free_blocks", 0)
    grid.add_row("cache", _bar(used, blocks), _cache(engine, used))
    if engine.get("num_host_blocks") or engine.get("num_blocks_in_store"):
        grid.add_row("stored", "", _stored(engine))
    if held := model.get("kv_blocks"):
        grid.add_row("users", "", _users(held))
    grid.add_row("speed", "", _speeds(engine, old, seconds))
    grid.add_row("control", "", _control(model, engine))
    style = "none" if model["is_healthy"] else "red"
    return Panel(grid, title=title, title_align="left", subtitle=_plain(model["device"]), border_style=style)


def _batch(engine: Status) -> str:
    running, waiting = engine.get("num_running", 0), engine.get("num_waiting", 0)
    traced = f" ({engine['num_traced']} traced)" if engine.get("num_traced") else ""
    if prefilling := engine.get("num_prefilling"):
        traced = f" ({prefilling} of them prompts){traced}"
    return f"{running} running{traced}, {waiting} waiting, {engine.get('num_preemptions', 0)} preempted so far"


def _cache(engine: Status, used: int) -> str:
    prompt, cached = engine.get("num_prompt_tokens", 0), engine.get("num_cached_tokens", 0)
    share = f"{cached / prompt:.0%} of prompts from the cache" if prompt else "no prompts yet"
    kept = f"{engine.get('num_cached_blocks', 0)} kept"
    if parked := engine.get("num_parked", 0):
        retained = f", {engine['num_retained']} of these retained" if engine.get("num_retained") else ""
        kept += f" ({engine.get('num_parked_blocks', 0)} of them for {parked} parked{retained})"
    return f"{used} of {engine.get('num_blocks', 0)} blocks in use, {kept}, {share}"


def _stored(engine: Status) -> str:
    """Return a summary of the KV blocks in host memory and on disk, with the number of tokens that were read from
    there."""
    host, on_disk = engine.get("num_host_blocks", 0), engine.get("num_blocks_in_store", 0)
    places = [f"{host} blocks in host memory ({engine.get('num_host_bytes', 0) >> 20} MiB)"] if host else []
    places += [f"{on_disk} blocks on disk"] if on_disk else []
    return f"{', '.join(places)}, {engine.get('num_restored_tokens', 0)} tokens read"


def _users(held: dict[str, int]) -> Text:
    """Return the users that own the most KV blocks."""
    most = sorted(held.items(), key=lambda each: -each[1])[:_MAX_USERS]
    more = f", {len(held) - len(most)} more" if len(held) > len(most) else ""
    return _plain("blocks of " + ", ".join(f"{user or 'no user'}: {count}" for user, count in most) + more)


def _speeds(engine: Status, old: Status, seconds: float) -> str:
    def rate(name: str) -> float:
        return float(engine.get(name, 0) - old.get(name, 0)) / seconds

    steps = engine.get("num_steps", 0) - old.get("num_steps", 0)
    busy = engine.get("step_seconds", 0.0) - old.get("step_seconds", 0.0)
    step = f", {1000 * busy / steps:.1f} ms a step" if steps else ""
    told = f"{rate('num_sampled_tokens'):.1f} tokens/s sampled, {rate('num_computed_tokens'):.1f} computed{step}"
    forced, rewound = rate("num_forced_tokens"), rate("num_rewound_tokens")
    told += f", {forced:.1f} forced, {rewound:.1f} rolled back" if forced or rewound else ""
    drafted = rate("num_drafted_tokens")
    return told + (f", {rate('num_accepted_tokens') / drafted:.0%} of {drafted:.1f} drafted right" if drafted else "")


def _control(model: Status, engine: Status) -> Text:
    line = _runtime(model.get("control"))
    if (policies := model.get("policy_control")) is not None:
        line = Text.assemble(line, ", of policies ", _runtime(policies))
    line.append(f", {engine.get('num_suspended', 0)} outputs wait for their controller")
    line.append(f", {engine.get('num_late_answers', 0)} late answers, {engine.get('num_forks', 0)} forks")
    return line


def _runtime(control: Status | None) -> Text:
    if control is None:
        return Text("no runtime", style="dim")
    line = Text("up", style="green") if control["is_up"] else Text("down", style="bold red")
    return line.append(f", {control['restarts']} restarts") if control["restarts"] else line


def _requests(now: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("age", "state", "user", "model", "steered by"):
        table.add_column(name, no_wrap=True)
    for name in ("prio", "prompt", "output", "tokens/s"):  # on a narrow screen, other columns shrink first
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("route", no_wrap=True)
    for row in now["requests"][:_MAX_ROWS]:
        table.add_row(*_request(row))
    more = now["num_requests"] - min(len(now["requests"]), _MAX_ROWS)
    if more > 0:
        table.add_row("...", f"{more} more")
    return table if now["num_requests"] else Text("no requests", style="dim")


def _request(row: Status) -> list[RenderableType]:
    steered = row["controller"] or row["constraint"] or ""
    age, tokens = row["age"], row["output_tokens"]
    return [
        _duration(age),
        Text(_plain(row["state"]).plain, style=_STATES.get(row["state"], "")),
        _plain(row["user"] or ""),
        _plain(row["adapter"] or row["model"] or ""),
        _plain(steered),
        str(row["priority"]),
        _prompt(row),
        str(tokens),
        f"{tokens / age:.1f}" if tokens and age else "",
        _plain(row["route"]),
    ]


def _prompt(row: Status) -> str:
    """Return the length of a prompt as text. While the prompt is being computed, the number of computed tokens precedes
    the length."""
    done = row.get("computed_prompt_tokens", 0) + row.get("cached_prompt_tokens", 0)
    return f"{done}/{row['prompt_tokens']}" if row["state"] == "prompt" else str(row["prompt_tokens"])


def _bar(value: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(value, max(total, 1)), width=_BAR_WIDTH)


def _plain(text: Any) -> Text:
    return Text(harmless(str(text), on_one_line=True))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"
