"""The page at `/`: the served models, how to call them, and a box to try them. One file that loads nothing from
elsewhere."""

from __future__ import annotations

import json
from html import escape
from string import Template
from typing import Any

from bridle.engine.interfaces import Task
from bridle.errors import UnknownModel
from bridle.service import ModelRegistry

_LOCKED = "<li>who has a key is told</li>"
_NOTHING = "<li>nothing yet: a model is loaded when a request names it</li>"


def render_page(registry: ModelRegistry, base_url: str, needs_key: bool = False) -> str:
    """The HTML for a server at `base_url` (which ends with a slash). With `needs_key` it shows no model, but asks for a
    key and then fetches the list by itself."""
    curl = escape(curl_line(registry, base_url, needs_key))
    if needs_key:
        return _PAGE.substitute(models=_LOCKED, options="", curl=curl, key_style="")
    rows = "".join(
        f"<li><b>{escape(model.name)}</b> &middot; context {model.max_sequence_tokens:,} tokens &middot; "
        f"{escape(model.info.dtype)} on {escape(model.info.device)}</li>"
        for model in registry
    )
    adapters = [name for slot in registry.slots for name in registry.adapter_names(slot)]
    options = "".join(_option(registry, name) for name in (*registry.names, *adapters))
    return _PAGE.substitute(models=rows or _NOTHING, options=options, curl=curl, key_style="display: none")


def curl_line(registry: ModelRegistry, base_url: str, needs_key: bool = False) -> str:
    """A command to paste into a shell. With `needs_key` it has a place for a key, and does not name the
    default model."""
    names = registry.names or registry.loadable_names
    name = names[0] if names else "demo"
    body: dict[str, Any] = {} if needs_key else {"model": name}
    path, example = _example(registry, name)
    quoted = json.dumps(body | example).replace("'", "'\\''")
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"curl -N {base_url}{path}{key} -H 'Content-Type: application/json' -d '{quoted}'"


def _example(registry: ModelRegistry, name: str) -> tuple[str, dict[str, Any]]:
    """A route that the model answers, and what to ask there."""
    task = _task(registry, name)
    if task != "generate":
        return ("v1/embeddings" if task == "embed" else "v1/classify"), {"input": ["Hello!"]}
    if _chats(registry, name):
        return "v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return "v1/completions", {"prompt": "Once", "max_tokens": 50, "stream": True}


def _task(registry: ModelRegistry, name: str) -> Task:
    """What a model is for. One that is not loaded is assumed to generate."""
    try:
        model = registry.slot_of(registry.choose(name).model).model
    except UnknownModel:
        return "generate"
    return "generate" if model is None else model.info.task


def _option(registry: ModelRegistry, name: str) -> str:
    chats = "" if _chats(registry, name) else ' data-chat="no"'
    return f"<option{chats}>{escape(name)}</option>"


def _chats(registry: ModelRegistry, name: str) -> bool:
    """Whether a model, or an adapter's model, takes conversations. A model that is not loaded is assumed to."""
    try:
        model = registry.slot_of(registry.choose(name).model).model
    except UnknownModel:
        return True
    return model is None or model.tokenizer.chat_template.is_present


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bridle</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
pre, textarea, #out { font: 14px/1.45 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .75rem; border: 1px solid #8886; border-radius: 6px; }
textarea { width: 100%; box-sizing: border-box; padding: .5rem; }
#out { white-space: pre-wrap; min-height: 4em; }
#out.bad { color: #c33; }
button, select { font: inherit; }
small { opacity: .7; }
</style>
</head>
<body>
<h1>bridle</h1>
<p>This server speaks the OpenAI API. It serves:</p>
<ul id="models">$models</ul>
<p>Try it from a shell:</p>
<pre>$curl</pre>
<p>or here:</p>
<form id="form">
<p style="$key_style"><label>API key: <input id="key" type="password" autocomplete="off"></label></p>
<textarea id="prompt" rows="3" aria-label="Prompt">Tell me a short story.</textarea>
<p>
<select id="model" aria-label="Model">$options</select>
<select id="kind" aria-label="Kind"><option value="chat">chat</option><option value="text">continue</option></select>
<button id="go">Send</button> <button id="stop" type="button" disabled>Stop</button> <small id="stats"></small>
</p>
</form>
<pre id="out"></pre>
<p><a href="docs">API reference</a> &middot; <a href="v1/models">models</a> &middot; <a href="metrics">metrics</a>
&middot; <a href="health/ready">health</a></p>
<script>
const $$ = id => document.getElementById(id);
let abort = null;
$$("key").value = sessionStorage.getItem("key") || "";
const headers = more => $$("key").value ? { ...more, Authorization: "Bearer " + $$("key").value } : more;
const fit = () => {
  const chosen = $$("model").selectedOptions[0];
  if (chosen) $$("kind").value = chosen.dataset.chat === "no" ? "text" : "chat";
};
$$("model").onchange = fit;
async function look() {
  sessionStorage.setItem("key", $$("key").value);
  const answer = await fetch("v1/models", { headers: headers({}) });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const rows = (await answer.json()).data;
  $$("model").replaceChildren(...rows.map(row => {
    const made = document.createElement("option");
    made.textContent = row.id;
    if (row.has_chat_template === false) made.dataset.chat = "no";
    return made;
  }));
  $$("models").replaceChildren(...rows.map(row => {
    const made = document.createElement("li");
    made.textContent = row.id + (row.max_model_len ? " \u00b7 context " + row.max_model_len + " tokens" : "");
    return made;
  }));
  fit();
}
const show = error => { $$("out").className = "bad"; $$("out").textContent += error.message; };
$$("key").onchange = () => { $$("out").textContent = ""; look().catch(show); };
if ($$("model").options.length || !$$("key").value) fit(); else look().catch(show);
$$("stop").onclick = () => abort && abort.abort();
$$("form").onsubmit = async event => {
  event.preventDefault();
  if (abort) return;
  abort = new AbortController();
  $$("out").textContent = ""; $$("out").className = ""; $$("stats").textContent = "";
  $$("go").disabled = true; $$("stop").disabled = false;
  try { await run($$("kind").value === "chat", $$("prompt").value); }
  catch (error) {
    if (error.name !== "AbortError") show(error);
  }
  abort = null; $$("go").disabled = false; $$("stop").disabled = true;
};
async function run(isChat, text) {
  const model = $$("model").value || null;
  const body = { model, max_tokens: 200, stream: true, stream_options: { include_usage: true } };
  if (isChat) body.messages = [{ role: "user", content: text }]; else body.prompt = text;
  const began = performance.now();
  const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body), signal: abort.signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices)
        $$("out").textContent += (isChat ? choice.delta.content : choice.text) || "";
      if (chunk.usage) {
        const seconds = (performance.now() - began) / 1000;
        $$("stats").textContent = chunk.usage.completion_tokens + " tokens, "
          + (chunk.usage.completion_tokens / seconds).toFixed(1) + " per second";
      }
    }
  }
}
</script>
</body>
</html>
""")
